"""The factory of snapshots, for the policies that only the papers need."""

from tests.autoscale.conftest import make_snapshot

__all__ = ["make_snapshot"]
