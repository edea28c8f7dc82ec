"""``python -m chainermn_ng.cli``: the same as ``chainermn-ng``."""

from chainermn_ng.cli.main import main

if __name__ == "__main__":
    main()
