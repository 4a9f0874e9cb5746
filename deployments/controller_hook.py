"""What Serve's controller calls before it starts anything: all that Tandem changes in Serve itself.

It does where its environment names ``IMPORT_PATH`` in ``RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH``; elsewhere
everything works but these changes.
"""

from deployments import proxy_hook, scheduler_hook

IMPORT_PATH = "deployments.controller_hook.install"


def install() -> None:
    """Make each change that can be made; what cannot be is logged."""
    scheduler_hook.install()
    proxy_hook.install()
