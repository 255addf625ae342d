"""The pure core: what is known, what it means, what to do next. No I/O in here (a test checks the imports)."""
