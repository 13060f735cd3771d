"""What a report says of clients: who came, and versions on their own samples."""

from __future__ import annotations

from shoal.broker.round_rows import RoundRows, begun, evaluated, sentence
from shoal.proto.broker_pb2 import (
    ClientNumber,
    ClientReports,
    Evaluation,
    RoundBegun,
    RoundDone,
    RoundMember,
    RoundWork,
    RunEvent,
    SampleRange,
    VersionEvaluated,
)
from shoal.sim.following import Following
from shoal.sim.report.pictures.picture import Picture
from shoal.sim.report.rounds import clients_of, rounds_of
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
    s = Summary(name="job", world="virtual", seed=1)
    followed = Following(s, {})
    for r in (2, 4):
        followed.see(RunEvent(evaluated=told(r)))
    assert [e.evaluated.round for e in followed.events] == [2, 4], "what --verify compares"
    assert [(row["round"], row["clients"]) for row in s.clients] == [(2, 7), (4, 7)]
    assert [row["clients_loss_most"] for row in s.clients] == [4.0, 6.0]
    text = render(s)
    assert "learned  held-out 0.625" in text
    assert "clients  7 on their own samples: loss 0.500 (least 0.125, median 0.250, most" in text
    assert "accuracy 0.750" in text
    pictures: dict[str, Picture] = {}
    sections = clients_of(s, pictures)
    assert [x.title for x in sections] == ["Clients' loss", "Clients' accuracy"]
    assert len(pictures) == 2
    assert not clients_of(Summary(name="job", world="virtual", seed=1), {})


def test_a_round_tells_how_many_clients_were_asked_came_and_were_lost() -> None:
    work = [
        RoundWork(replica=n, cohort=[SampleRange(first=first, count=count)])
        for n, first, count in ((0, 0, 5), (1, 5, 3))
    ]
    begins = RunEvent(round_begun=RoundBegun(round=0, work=work))
    assert begun(begins) == "round 0 begins: replica 0 trains 5 clients, replica 1 trains 3 clients"
    done = RoundDone(
        **{"round": 0, "attempt": 2, "members": [RoundMember(replica=0, weight=40)]},
        **{"clients_moved": 2.0, "mean_moved": 0.5, "sent_bytes": 10, "seconds": 3.0},
        skipped=7,
    )
    rows = RoundRows()
    rows.see(begins)
    rows.see(RunEvent(round_done=done))
    [row] = rows.rows
    assert (row.asked, row.came, row.alike) == (8, 5, 0.25)
    said = "5 of 8 clients, alike by 25%, 7 local steps skipped: overflow"
    assert said in sentence(row)
    told = row.table()
    assert "staleness" not in told
    assert told["skipped"] == 7
    assert (told["clients_asked"], told["clients_came"], told["clients_lost"]) == (8, 5, 3)
    s = Summary(name="job", world="virtual", seed=1, rounds=(told,))
    body = rounds_of(s, {})[-1].html()
    for cell in (">8<", ">5<", ">3<", ">25%<"):
        assert cell in body


def test_of_clients_that_send_a_part_nobody_says_how_alike_they_moved() -> None:
    """With what is left of earlier rounds the mean may be longer than any move."""
    done = RoundDone(round=0, attempt=1, clients_moved=2.0, mean_moved=2.6)
    done.uploads.clients = 5
    row = RoundRows().see(RunEvent(round_done=done))
    assert row is not None
    assert row.alike is None
    assert "alike" not in sentence(row)


def test_a_round_tells_who_chose_its_clients() -> None:
    rows, table = RoundRows(), list[dict[str, object]]()
    for number, chosen in enumerate((False, True, False)):
        work = RoundWork(replica=0, cohort=[SampleRange(count=2)])
        rows.see(RunEvent(round_begun=RoundBegun(round=number, work=[work], chosen=chosen)))
        rows.see(RunEvent(round_begun=RoundBegun(round=number, work=[work])))  # another term
        members = [RoundMember(replica=0, weight=2)]
        clients = ClientReports(clients=[3, 4])
        rows.see(RunEvent(round_done=RoundDone(round=number, members=members, clients=clients)))
        by = "rule" if chosen else "run"
        assert f"2 of 2 clients, chosen by the {by}" in sentence(rows.rows[-1])
        table.append(rows.rows[-1].table())
    assert [row["chosen_by"] for row in table] == ["run", "rule", "run"]
    body = rounds_of(Summary(name="job", world="virtual", seed=1, rounds=tuple(table)), {})[-1]
    assert ">chosen by<" in body.html()
    assert ">rule<" in body.html()


def test_a_version_of_clients_that_began_with_older_ones_tells_how_old() -> None:
    work = [
        RoundWork(replica=n, cohort=[SampleRange(first=4 * n, count=count)], behind=behind)
        for n, count, behind in ((0, 3, 0), (1, 2, 3), (2, 4, 1))
    ]
    begins = RunEvent(round_begun=RoundBegun(round=5, work=work))
    assert begun(begins) == "round 5 begins: replica 0 trains 3 clients", "the others go on"
    members = [
        RoundMember(replica=0, weight=40 << 20, unit=1 << 20),
        RoundMember(replica=1, weight=30 << 19, unit=1 << 20, behind=3),
    ]
    rows = RoundRows()
    rows.see(begins)
    rows.see(RunEvent(round_done=RoundDone(round=5, attempt=1, members=members, going=[2])))
    [row] = rows.rows
    assert (row.asked, row.came, row.going, row.left_out) == (5, 5, (2,), ())
    assert [m.samples for m in row.members] == [40, 30], "as many as they are, whatever they count"
    line = sentence(row)
    assert "replicas 0 (3 clients), 1 (2 clients); 2 still at work" in line
    assert "5 of 5 clients, behind by versions: 3 by 0, 2 by 3" in line
    told = row.table()
    assert told["staleness"] == [(0, 3), (3, 2)]
    s = Summary(name="job", world="virtual", seed=1, rounds=(told,))
    body = rounds_of(s, {})[-1].html()
    assert "clients by versions behind" in body
    assert "0: 3, 3: 2" in body
