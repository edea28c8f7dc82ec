"""The command line: ``chainermn-ng``, also ``python -m chainermn_ng.cli``."""
