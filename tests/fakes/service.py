"""A service that loads nothing, for `launcher` tests. FAKE_BEHAVIOUR says what it does."""

import os
import signal
import sys
import time

behaviour = os.environ["FAKE_BEHAVIOUR"]
print(f"fake {behaviour} started as {os.getpid()}", flush=True)
if behaviour == "die":
    print("cannot go on: out of luck", file=sys.stderr)
    sys.exit(3)
if behaviour == "ignore":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
while True:
    time.sleep(0.05)
