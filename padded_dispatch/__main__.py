"""`python -m padded_dispatch` is the command `padded-dispatch`."""

import sys

from padded_dispatch.cli import main

sys.exit(main())
