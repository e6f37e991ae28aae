"""``python -m evenkeel`` is ``evenkeel-run``."""

import sys

from evenkeel.run import main

sys.exit(main())
