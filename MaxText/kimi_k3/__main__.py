"""`python -m kimi_k3` is `kimi-k3`."""

import sys

from kimi_k3.cli.main import main

sys.exit(main())
