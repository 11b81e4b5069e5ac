"""`python -m aotllm`."""

import sys

from aotllm.cli import main

sys.exit(main())
