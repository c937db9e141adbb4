"""The command line, without the early handler of Ctrl-C of `turnstream_server.__main__`."""

from __future__ import annotations

from turnstream_server.cli import main

if __name__ == "__main__":
    main()
