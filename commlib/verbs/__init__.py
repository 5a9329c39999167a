"""What each verb does: from a call's arguments to an operation that one rank runs."""
