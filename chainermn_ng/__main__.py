"""``python -m chainermn_ng``: see chainermn_ng.launcher."""

from chainermn_ng.launcher import main

if __name__ == "__main__":
    main()
