"""Makes a pair of models ready before services start: `python -m launcher.prepare TARGET [DRAFTER]`.

For starts without the launcher (docker compose): fetches and converts the embedded target if TARGET is where it belongs
in the cache directory, and refuses a drafter that does not fit, in words, before anything is loaded. Without a drafter
(left out, or "none") only the target is seen to.
"""

from __future__ import annotations

import sys

from launcher.models import choose_models
from launcher.settings import LauncherSettings
from service_kit.errors import ConfigurationError
from service_kit.settings import CommonSettings, load_settings


def main(arguments: list[str]) -> int:
    """Prints what will be served; returns the exit status."""
    if not 1 <= len(arguments) <= 2:
        print("usage: python -m launcher.prepare TARGET [DRAFTER]", file=sys.stderr)
        return 2
    target, drafter = (*arguments, "none")[:2]
    try:
        pair = choose_models(target, drafter, load_settings(CommonSettings), load_settings(LauncherSettings))
    except ConfigurationError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    print(f"target {pair.target}\ndrafter {pair.drafter or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
