pytest_plugins = ["tests.multirank"]
