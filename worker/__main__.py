"""``python -m worker --join URL``: this host's agent; ``python -m worker job check FILE:Name``: will it train?"""

import os
import sys

from worker.command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
