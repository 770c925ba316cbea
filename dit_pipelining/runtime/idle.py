"""Tell the user once if replicas have nothing to do."""

import warnings

from dit_pipelining.runtime.turns import Turns

LONELY_CALLS = 3
"""Calls one after the other, each waited for before the next, after which replicas are said to idle."""


class IdleReplicas:
    """Watches the calls of one transformer.

    Args:
        name: of the transformer in its pipeline.
        replicas: how many there are.
    """

    def __init__(self, name: str, replicas: int) -> None:
        self.name = name
        self.replicas = replicas
        self._lonely = 0

    def see(self, turns: Turns, parts: int) -> None:
        """Note a call that is about to be submitted in this many parts; warns at most once.

        A call has company if it is cut, if another one of its step is in flight, or if other requests may be.
        """
        if self._lonely > LONELY_CALLS or self.replicas == 1:
            return
        if parts > 1 or turns.current().submitted or not turns.is_alone:
            self._lonely = 0
            return
        self._lonely += 1
        if self._lonely > LONELY_CALLS:
            warnings.warn(
                f"cfg_parallel_size={self.replicas}, but the pipeline calls {self.name} once a step with nothing to cut: "
                f"{self.replicas - 1} of {self.replicas} replicas idle. Switch guidance on, run several requests with "
                "generate(), or give the ranks to pipeline_parallel_size.",
                stacklevel=2,
            )
