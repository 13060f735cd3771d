"""What a report says of clients: of versions on their own samples."""

from __future__ import annotations

from shoal.broker.round_rows import client_numbers, evaluated
from shoal.proto.broker_pb2 import ClientNumber, Evaluation, RunEvent, VersionEvaluated
from shoal.sim.report.pictures.picture import Picture
from shoal.sim.report.rounds import clients_of
from shoal.sim.report.summary import Summary
from shoal.sim.report.text import render


def told(round_: int) -> VersionEvaluated:
    numbers = [
        ClientNumber(name="loss", clients=7, mean=0.5, least=0.125, median=0.25, most=2.0 + round_),
        ClientNumber(name="accuracy", clients=7, mean=0.75, least=0.0, median=0.875, most=1.0),
    ]
    return VersionEvaluated(round=round_, evaluation=Evaluation(loss=0.625, clients=numbers))


def test_versions_on_clients_own_samples_are_told_in_lines_and_pictures() -> None:
    line = evaluated(RunEvent(evaluated=told(3)))
    assert "held-out 0.6250" in line
    assert "loss 0.5000 (0.1250, 0.2500, 5.0000) over 7 clients" in line
    rows = tuple({"round": r, **client_numbers(told(r).evaluation)} for r in (2, 4))
    assert rows[0]["clients"] == 7
    assert [row["clients_loss_most"] for row in rows] == [4.0, 6.0]
    s = Summary(name="job", world="virtual", seed=1, step_s=1.0, eval_loss=0.625, clients=rows)
    text = render(s)
    assert "learned  held-out 0.625" in text
    assert "clients  7 on their own samples: loss 0.500 (least 0.125, median 0.250, most" in text
    assert "accuracy 0.750" in text
    pictures: dict[str, Picture] = {}
    sections = clients_of(s, pictures)
    assert [x.title for x in sections] == ["Clients' loss", "Clients' accuracy"]
    assert len(pictures) == 2
    assert not clients_of(Summary(name="job", world="virtual", seed=1), {})
