"""Python imports this as it starts, if this folder is on its path: see ci/coverage.sh."""

import coverage

coverage.process_startup()
