"""`millrace serve` becomes `python -P -m millrace.engine_service`: run the service."""

import signal
import sys

if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):  # before the imports, which take half a second
        signal.signal(number, lambda *_: sys.exit(0))
    from millrace.engine_service.serve import main

    sys.exit(main())
