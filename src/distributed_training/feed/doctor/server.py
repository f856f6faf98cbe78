"""A server that only answers doctors: to try the way to a GPU machine before anything is to be trained there."""

from __future__ import annotations

from distributed_training.feed.doctor.session import Doctors
from distributed_training.feed.guests import Guest, MakeGuest, Unwanted
from distributed_training.feed.server import FeedServer
from distributed_training.feed.session import Session
from distributed_training.feed.turns import Turns
from distributed_training.wire import Role

_NOTHING_ELSE = "only `dtrain doctor --listen` runs here, which trains nothing; start `dtrain serve`"


class DoctorServer(FeedServer):
    """As a server that trains, with the same door, token and certificate; but loaders and clients are turned away."""

    def _make_guests(self, service: Turns | None) -> dict[Role, MakeGuest]:
        def unwanted(session: Session) -> Guest:
            return Unwanted(session, _NOTHING_ELSE)

        return {Role.WORKER: unwanted, Role.CLIENT: unwanted, Role.DOCTOR: Doctors("doctors only").guest}
