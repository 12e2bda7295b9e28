"""MaxEngine with our checkpoint loader. Its own makes the whole model from random numbers before it reads a byte."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from flax.linen import logical_axis_rules
from maxtext.inference.maxengine import maxengine
from maxtext.utils import maxtext_utils, sharding

from kimi_k3.maxtext_adapter.checkpoint import load_params
from kimi_k3.maxtext_adapter.engine import checkpoint_path, concrete_rest


class KimiMaxEngine(maxengine.MaxEngine):
  """The same engine; the parameters come from an exactly fitting checkpoint or not at all."""

  def _load_params_nnx(self, params: Any, rng: Any) -> Any:
    """Returns the parameters and fills in what prefill, insert and generate look up."""
    del rng  # nothing is random here
    _, abstract, _, rest = nnx.split(self.model, nnx.Param, nnx.Cache, ...)
    with logical_axis_rules(self.config.logical_axis_rules):
      placed = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        abstract,
        sharding.nnx_construct_named_sharding(abstract, self._mesh),
      )
    if params is None:
      params = load_params(checkpoint_path(self.config), placed)
    else:
      params = jax.tree.map(lambda leaf, place: jax.device_put(leaf, place.sharding), params, placed)
    self._nnx_rest_state = concrete_rest(rest)
    self.abstract_params = jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), params
    )
    self._find_cache_shardings()
    return params

  def prefill_concat(self, **arguments: Any) -> Any:
    """Refuses: prompts packed in one row would share the one recurrent state, and each slot get the last one's."""
    del arguments
    raise NotImplementedError("packed prefill (prefill_concat) is not supported: prefill the prompts one by one")

  def _find_cache_shardings(self) -> None:
    def named(annotations):
      return jax.tree.map(lambda spec: jax.sharding.NamedSharding(self._mesh, spec), annotations)

    self.prefill_kv_cache_annotations = maxtext_utils.get_prefill_kv_cache_annotations_nnx(
      self.model, self.config, self._mesh
    )
    self.kv_cache_annotations = maxtext_utils.get_kv_cache_annotations_nnx(self.model_ar, self.config, self._mesh)
    self.prefill_kv_cache_shardings = named(self.prefill_kv_cache_annotations)
    self.kv_cache_shardings = named(self.kv_cache_annotations)
    self.state_mesh_annotations = None
