"""OUT in a bucket: gs:// through TensorStore, against a stand-in for the service (tests/fake_gcs.py)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from kimi_k3.convert import export, index, output, plan, reader, storage, verify
from kimi_k3.convert.plan import Options
from kimi_k3.convert.unfinished import MARKERS
from kimi_k3.errors import InputError

URL = "gs://some-bucket/models/k3"
PREFIX = "models/k3/"
TESTS = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def service():
  """(address, bucket). One for the module: TensorStore asks for the address once."""
  spec = importlib.util.spec_from_file_location("fake_gcs", TESTS / "fake_gcs.py")
  assert spec
  assert spec.loader
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  with module.serve() as (address, bucket):
    yield address, bucket


@pytest.fixture
def bucket(service, monkeypatch):
  address, bucket = service
  monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", address)
  bucket.objects.clear()
  bucket.writes.clear()
  bucket.refuse_writes_after = None
  return bucket


@pytest.fixture
def source(small_sources) -> index.Source:
  return small_sources["k3"]


def convert(out: str, source: index.Source, **job) -> output.Outcome:
  planned = plan.make_plan(source, Options())
  assert not output.check_output(out, source, planned, overwrite=False)
  return output.convert(out, source, planned, output.Job(commit="marker", workers=2, **job))


def held(bucket) -> dict[str, bytes]:
  return {name.removeprefix(PREFIX): data for name, (_, data) in bucket.objects.items()}


def files(out: Path) -> dict[str, bytes]:
  return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_a_bucket_gets_the_same_files_as_a_directory_and_the_marker_last(bucket, source, tmp_path):
  assert convert(URL, source).finished
  convert(str(tmp_path / "out"), source)
  assert held(bucket) == files(tmp_path / "out")
  assert bucket.writes[-1] == PREFIX + MARKERS[-1]
  assert output.check_output(URL, source, plan.make_plan(source, Options()), overwrite=False)


@pytest.mark.parametrize("writes", [1, 9, 30, -3])
def test_a_bucket_that_takes_no_more_stops_the_conversion_and_the_next_run_goes_on(bucket, source, tmp_path, writes):
  convert(str(tmp_path / "out"), source)
  whole = files(tmp_path / "out")
  bucket.refuse_writes_after = writes if writes > 0 else 2 * len([n for n in whole if "/d/0" in n]) + len(whole) - 30
  with pytest.raises(InputError, match=r"gs://some-bucket/models/k3/.* cannot be written: .*") as error:
    convert(URL, source)
  assert "\n" not in str(error.value)
  assert not set(MARKERS) & set(held(bucket))
  done = sum("/journal/" in name for name in bucket.objects)
  bucket.writes.clear()
  bucket.refuse_writes_after = None
  outcome = convert(URL, source)
  assert (outcome.found, outcome.written) == (done, outcome.slices - done)
  assert held(bucket) == whole


def test_parts_of_several_machines_meet_in_the_bucket(bucket, source, tmp_path):
  convert(str(tmp_path / "out"), source)
  for part in (2, 3, 1):
    with_missing = convert(URL, source, part=(part, 3), finish=False)
    assert not with_missing.finished
  assert with_missing.missing == 0
  assert convert(URL, source, convert=False).finished
  assert held(bucket) == files(tmp_path / "out")


def test_what_is_in_the_bucket_is_verified_and_exported_from_there(bucket, source, tmp_path):
  convert(URL, source)
  found = reader.open_output(URL)
  assert verify.verify(source, found, sample=None, workers=2).ok
  export.export(tmp_path / "back", export.plan_export(found, None), workers=2, overwrite=False)
  with index.open_source(tmp_path / "back") as back:
    for name, tensor in storage.text_tensors(source).items():
      assert back.tensors[name].dtype == tensor.dtype
      assert back.read(name).tobytes() == source.read(name).tobytes()
  name = next(n for n in bucket.objects if "/items/d/0" in n)
  generation, data = bucket.objects[name]
  bucket.objects[name] = (generation + 1, bytes((data[0] ^ 1,)) + data[1:])
  assert not verify.verify(source, reader.open_output(URL), sample=None, workers=2).ok
  del bucket.objects[PREFIX + MARKERS[-1]]
  with pytest.raises(InputError, match="marker"):
    reader.open_output(URL)


def test_what_is_in_the_bucket_and_is_no_conversion_is_not_touched(bucket, source):
  bucket.write(f"{PREFIX}thesis.tex", b"years of work")
  with pytest.raises(InputError, match=r"not empty, but no conversion\.json"):
    convert(URL, source)
  assert held(bucket) == {"thesis.tex": b"years of work"}


@pytest.mark.slow
def test_decode_loads_from_the_bucket_and_refuses_it_without_the_marker(service, k3_tiny, tmp_path):
  address, bucket = service
  bucket.objects.clear()
  environment = os.environ | {"TENSORSTORE_GCS_HTTP_URL": address, "STORAGE_EMULATOR_HOST": address}

  def kimi_k3(*words):
    command = [sys.executable, "-m", "kimi_k3.cli.main", *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)

  assert kimi_k3("convert", k3_tiny.checkpoint, URL).returncode == 0
  config = yaml.safe_load(held(bucket)["decode.yml"])
  (tmp_path / "decode.yml").write_text(yaml.safe_dump(config | {"load_parameters_path": f"{URL}/0/items"}))
  (tmp_path / "rows.json").write_text(json.dumps(k3_tiny.prompts[:1]))
  words = ("logits", tmp_path / "decode.yml", "--tokens", tmp_path / "rows.json", "--out", tmp_path / "l.npz")
  words += ("dtype=float32", "matmul_precision=highest")
  result = kimi_k3(*words)
  assert result.returncode == 0, result.stderr
  found, expected = np.load(tmp_path / "l.npz")["logits_0"], k3_tiny.arrays["logits_0"]
  # The tolerance of the golden cases (model_test.py): float32 sums in another order.
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
  del bucket.objects[PREFIX + MARKERS[-1]]
  result = kimi_k3(*words)
  assert result.returncode == 2
  assert "commit marker" in result.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_trainers_step_is_exported_from_the_bucket(bucket, tiny_checkpoint, trained_step, tmp_path):
  from kimi_k3.convert import trained, training_step

  made = tiny_checkpoint("--layers", "12", "--set", "num_experts=4", "--set", "num_experts_per_token=2")
  for number, (name, data) in enumerate(files(trained_step(made, "--scan")).items(), 1):
    bucket.objects[f"models/run/checkpoints/7/{name}"] = (number, data)
  with index.open_source(made) as released:
    config = plan.make_plan(released, Options(experts="bf16")).config
    step = training_step.open_training(
      "gs://some-bucket/models/run/checkpoints/7", config, scan=True, weight_dtype="float32"
    )
    planned = trained.plan_export(step, experts=None, shard_bytes=10**9)
    trained.export(tmp_path / "hf", planned, workers=2, overwrite=False)
    with index.open_source(tmp_path / "hf") as back:
      for name in storage.text_tensors(released):
        assert back.read(name).tobytes() == released.read(name).tobytes()
