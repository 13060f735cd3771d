"""Who may come in: every rule of `broker/access/admission.py`, with time as an argument."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shoal.broker.access.admission import Admission, AdmissionError, AdmissionLimits
from shoal.net.identity.authority import Authority, utc
from shoal.net.identity.credential import Credential, new_key, request_of
from shoal.net.identity.names import Party, PartyRole
from shoal.net.identity.token import Token
from shoal.proto.admission_pb2 import Admitted, JoinRequest

NOW = 1_700_000_000.0
HOUR = timedelta(hours=1)
AUTHORITY = Authority.new(utc(NOW))
REQUESTS = [request_of(new_key()) for _ in range(6)]


def asked(token: Token, request: bytes = REQUESTS[0], name: str = "home", version: int = 1):
    return JoinRequest(
        version=version, invitation=token.id, secret=token.secret, request=request, name=name
    )


def party_of(admitted: Admitted) -> Party:
    return Credential(b"", admitted.certificate, AUTHORITY.pem).party


@pytest.fixture
def admission():
    found = Admission(AUTHORITY, None)
    yield found
    found.close()


def invited(admission: Admission, uses: int = 1, role: PartyRole = PartyRole.PEER) -> Token:
    return admission.invite(role, uses, HOUR, "test", NOW)


def refused(admission: Admission, request: JoinRequest, now_s: float = NOW) -> tuple[str, str]:
    with pytest.raises(AdmissionError) as caught:
        admission.join(request, now_s)
    return caught.value.code, caught.value.reason


@pytest.mark.parametrize("role", [PartyRole.PEER, PartyRole.SUBMITTER, PartyRole.OPERATOR])
def test_a_token_admits_in_its_role(admission, role):
    admitted = admission.join(asked(invited(admission, role=role)), NOW)
    assert party_of(admitted) == Party(role, admitted.subject)
    assert admitted.subject.startswith("home-")


def test_a_counted_token_admits_so_many_keys(admission):
    token = invited(admission, uses=3)
    subjects = {admission.join(asked(token, r), NOW).subject for r in REQUESTS[:3]}
    assert len(subjects) == 3
    assert refused(admission, asked(token, REQUESTS[3])) == (
        "UNAUTHENTICATED",
        "the token admits nobody any more: all of its uses (3) are taken, or a kick closed it: ask "
        "for another (`shoal invite`)",
    )


def test_a_lost_answer_costs_no_use_and_a_replay_gains_nothing(admission):
    token = invited(admission)
    first, second = (admission.join(asked(token), NOW) for _ in range(2))
    assert first.subject == second.subject
    # Whoever recorded the request gets a certificate for a key that they do not have.
    key = Credential(b"", second.certificate, AUTHORITY.pem)._leaf.public_key()
    assert key == Credential(b"", first.certificate, AUTHORITY.pem)._leaf.public_key()


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"secret": bytes(16)}, "UNAUTHENTICATED", "no such token"),
        ({"invitation": bytes(8)}, "UNAUTHENTICATED", "no such token"),
        ({"invitation": b""}, "UNAUTHENTICATED", "that is no token"),
        ({"secret": bytes(1 << 20)}, "UNAUTHENTICATED", "that is no token"),
        ({"version": 2}, "FAILED_PRECONDITION", "speaks version 1 of joining, the other side 2"),
        ({"name": ""}, "INVALID_ARGUMENT", "is no name"),
        ({"name": "../../etc"}, "INVALID_ARGUMENT", "is no name"),
        ({"name": "a" * 65}, "INVALID_ARGUMENT", "is no name"),
        ({"name": "a\x1b[2J"}, "INVALID_ARGUMENT", r"is no name"),
        ({"request": b"nonsense"}, "INVALID_ARGUMENT", "cannot be read"),
    ],
)
def test_what_is_wrong_is_named_and_takes_no_use(admission, change, code, said):
    token = invited(admission)
    request = asked(token)
    for name, value in change.items():
        setattr(request, name, value)
    found, why = refused(admission, request)
    assert found == code
    assert said in why
    assert "\x1b" not in why
    assert admission.join(asked(token), NOW).subject


def test_an_ended_token_says_since_when(admission):
    token = invited(admission)
    code, why = refused(admission, asked(token), NOW + 3 * 3600.0)
    assert (code, why[:28]) == ("UNAUTHENTICATED", "the token ended 2 hours ago:")


def test_a_token_of_another_broker_is_none(admission):
    other = Admission(Authority.new(utc(NOW)), None)
    assert refused(admission, asked(invited(other)))[0] == "UNAUTHENTICATED"
    other.close()


def test_a_key_that_joined_does_not_take_another_role(admission):
    admission.join(asked(invited(admission)), NOW)
    code, why = refused(admission, asked(invited(admission, role=PartyRole.OPERATOR)))
    assert code == "ALREADY_EXISTS"
    assert "joined as peer" in why


def test_renewal_needs_the_same_key_and_a_party_that_joined(admission):
    subject = admission.join(asked(invited(admission)), NOW).subject
    renewed = admission.renew(Party(PartyRole.PEER, subject), REQUESTS[0], NOW + 9e4)
    assert Credential(b"", renewed.certificate, AUTHORITY.pem).ends > utc(NOW + 9e4)
    for party, request in (
        (Party(PartyRole.PEER, subject), REQUESTS[1]),
        (Party(PartyRole.OPERATOR, subject), REQUESTS[0]),
        (Party(PartyRole.PEER, "stranger"), REQUESTS[0]),
    ):
        with pytest.raises(AdmissionError) as caught:
            admission.renew(party, request, NOW)
        assert caught.value.code == "PERMISSION_DENIED"


def test_who_was_kicked_stays_out_after_a_restart_too(tmp_path: Path):
    path = tmp_path / "admissions.sqlite"
    admission = Admission(AUTHORITY, path)
    token = invited(admission, uses=5)
    subject = admission.join(asked(token), NOW).subject
    assert admission.kick(subject, NOW) is PartyRole.PEER
    for _ in range(2):
        with pytest.raises(AdmissionError, match="was kicked"):
            admission.check(Party(PartyRole.PEER, subject))
        with pytest.raises(AdmissionError, match="was kicked"):
            admission.renew(Party(PartyRole.PEER, subject), REQUESTS[0], NOW)
        assert refused(admission, asked(token)) == (
            "PERMISSION_DENIED",
            f"{subject} was kicked out of this network",
        )
        admission.close()
        admission = Admission(AUTHORITY, path)
    with pytest.raises(AdmissionError, match="nobody ever joined"):
        admission.kick("nobody", NOW)
    admission.close()


def test_who_was_kicked_does_not_come_back_by_a_token_that_it_used_or_gave_out(admission):
    used = invited(admission, uses=5)
    peer = admission.join(asked(used, REQUESTS[0]), NOW)
    operator = admission.join(asked(invited(admission, role=PartyRole.OPERATOR), REQUESTS[1]), NOW)
    given = admission.invite(PartyRole.OPERATOR, 9, HOUR, operator.subject, NOW)
    other = invited(admission)
    for subject in (peer.subject, operator.subject):
        admission.kick(subject, NOW)
    for token in (used, given):
        assert refused(admission, asked(token, REQUESTS[2]))[0] == "UNAUTHENTICATED"
    assert admission.join(asked(other, REQUESTS[2]), NOW).subject


def test_all_tokens_that_it_used_end_not_the_newest_alone(tmp_path: Path):
    path = tmp_path / "admissions.sqlite"
    admission = Admission(AUTHORITY, path)
    many, single, again = (invited(admission, uses=n) for n in (5, 1, 5))
    for token in (many, single, again, many, single):  # a use each, however often it comes
        subject = admission.join(asked(token), NOW).subject
    admission.close()
    admission = Admission(AUTHORITY, path)
    admission.kick(subject, NOW)
    for token in (many, single, again):
        assert refused(admission, asked(token, REQUESTS[1]))[0] == "UNAUTHENTICATED"
    admission.close()


def test_a_key_whose_certificate_ended_comes_back_by_a_new_token_as_who_it_was(admission):
    first = admission.join(asked(invited(admission)), NOW)
    token = invited(admission)
    again = admission.join(asked(token), NOW + 1800)
    assert again.subject == first.subject
    assert admission.open_for(token, NOW + 1800) == 0  # it took the use


@pytest.mark.parametrize(
    ("role", "uses", "lasts", "said"),
    [
        (PartyRole.BROKER, 1, HOUR, "nobody joins as"),
        (PartyRole.PEER, 0, HOUR, "0 uses: expected 1 to"),
        (PartyRole.PEER, 10**6, HOUR, "expected 1 to 10000"),
        (PartyRole.PEER, 1, timedelta(0), "more than nothing"),
        (PartyRole.PEER, 1, timedelta(days=1000), "at most 365 days"),
    ],
)
def test_an_invitation_that_cannot_be_is_refused(admission, role, uses, lasts, said):
    with pytest.raises(AdmissionError, match=said):
        admission.invite(role, uses, lasts, "test", NOW)


def test_invitations_and_parties_are_bounded():
    limits = AdmissionLimits(most_invitations=2, most_parties=1)
    admission = Admission(AUTHORITY, None, limits)
    token, _ = invited(admission, uses=5), invited(admission)
    with pytest.raises(AdmissionError, match="2 invitations are open"):
        invited(admission)
    admission.invite(PartyRole.PEER, 1, HOUR, "test", NOW + 7200)  # ended ones make room
    admission.close()
    admission = Admission(AUTHORITY, None, limits)
    token = invited(admission, uses=5)
    admission.join(asked(token), NOW)
    assert refused(admission, asked(token, REQUESTS[1]))[0] == "FAILED_PRECONDITION"
    admission.close()


def test_a_file_that_is_no_list_is_a_clear_error(tmp_path: Path):
    path = tmp_path / "admissions.sqlite"
    path.write_bytes(b"nonsense" * 1000)
    with pytest.raises(OSError, match="not a database"):
        Admission(AUTHORITY, path)
    with pytest.raises(OSError, match="is its folder writable"):
        Admission(AUTHORITY, tmp_path / "nowhere" / "x.sqlite")


class Doors(RuleBasedStateMachine):
    """Against a plain model: a set of keys per token, and a set of those who were kicked."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(AUTHORITY, None)
        self.now = NOW
        self.tokens: list[tuple[Token, int, float]] = []
        self.left: list[int] = []  # uses, by token
        self.joined: dict[int, str] = {}  # subjects
        self.used: dict[int, set[int]] = {}  # tokens
        self.kicked: set[int] = set()

    def teardown(self) -> None:
        self.admission.close()

    @rule(uses=st.integers(1, 3), hours=st.integers(1, 5))
    def invite(self, uses: int, hours: int) -> None:
        token = self.admission.invite(PartyRole.PEER, uses, hours * HOUR, "test", self.now)
        self.tokens.append((token, uses, self.now + 3600.0 * hours))
        self.left.append(uses)

    @rule(hours=st.floats(0.1, 3))
    def wait(self, hours: float) -> None:
        self.now += 3600.0 * hours

    @rule(which=st.integers(0, 20), key=st.integers(0, 5))
    def join(self, which: int, key: int) -> None:
        if not self.tokens:
            return
        at = which % len(self.tokens)
        token, _, ends = self.tokens[at]
        again = at in self.used.get(key, ())
        # A key that joined by another token takes a use of this one, and keeps its subject.
        expected = ends > self.now and key not in self.kicked and (again or self.left[at] > 0)
        try:
            admitted = self.admission.join(asked(token, REQUESTS[key]), self.now)
        except AdmissionError:
            assert not expected
        else:
            assert expected
            if not again:
                self.left[at] -= 1
            assert self.joined.setdefault(key, admitted.subject) == admitted.subject
            self.used.setdefault(key, set()).add(at)

    @rule(key=st.integers(0, 5))
    def kick(self, key: int) -> None:
        if key in self.joined:
            self.admission.kick(self.joined[key], self.now)
            self.kicked.add(key)
            for at in self.used[key]:
                self.left[at] = 0

    @invariant()
    def nobody_who_was_kicked_passes(self) -> None:
        for key, subject in self.joined.items():
            party = Party(PartyRole.PEER, subject)
            if key in self.kicked:
                with pytest.raises(AdmissionError):
                    self.admission.check(party)
            else:
                self.admission.check(party)


TestDoors = Doors.TestCase
TestDoors.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
