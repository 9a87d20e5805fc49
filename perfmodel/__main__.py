"""``python -m perfmodel``: the same as the command."""

from perfmodel.cli import main

raise SystemExit(main())
