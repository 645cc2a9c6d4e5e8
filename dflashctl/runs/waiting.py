"""Stay with a run that was launched: for its end, or until it gets nowhere any more."""

from __future__ import annotations

import time

from dflashctl.errors import Unreachable
from dflashctl.remote.agent_call import call
from dflashctl.remote.engine import Engine
from dflashctl.runs.ending import End
from dflashctl.runs.notify import Once
from dflashctl.runs.status import Memory, look

WAIT_SLICE_S = 25.0
LOST_FOR_S = 300.0
RETRY_S = 5.0


def wait(engine: Engine, state_dir: str, run_id: str) -> End:
    """Until the run has ended, or two looks in a row call it wedged: such a run may never end, and a script
    would wait with it. Lost contact is borne for LOST_FOR_S, then raised."""
    request = {"state_dir": state_dir, "id": run_id, "wait_s": WAIT_SLICE_S}
    lost_since: float | None = None
    memory, once = Memory(), Once()
    while True:
        try:
            answer = call(engine, "wait_end", request, timeout_s=WAIT_SLICE_S + 30)
            if not answer["live"]:
                return End(answer["exit"], answer["problem"], answer["log_tail"], answer["root_cause"])
            news = once.news(look(engine, run_id=run_id, memory=memory))
        except Unreachable as error:
            lost_since = lost_since or time.monotonic()
            if time.monotonic() - lost_since > LOST_FOR_S:
                hint = "the run goes on; dflashctl status"
                raise Unreachable(error.what, where=error.where, next=hint) from error
            engine.close()
            time.sleep(RETRY_S)
            continue
        lost_since = None
        for each in news:
            if each.state == "wedged":
                return End(None, None, "", wedged=each)
