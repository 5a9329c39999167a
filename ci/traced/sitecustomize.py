"""Python imports this as it starts, if this folder is on its path: see `ci.suites`."""

import coverage

coverage.process_startup()
