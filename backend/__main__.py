"""``python -m backend``: serve a controller, try the demo, or talk to a running controller."""

from backend.cli.app import main

if __name__ == "__main__":
    main()
