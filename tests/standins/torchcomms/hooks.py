"""The module in which torch looks for the flight recorder, which the stand-in does not have."""


class FlightRecorderHook:
    def __init__(self, max_entries: int) -> None: ...

    def register_with_comm(self, comm: object) -> None: ...
