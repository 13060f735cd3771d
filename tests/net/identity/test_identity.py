"""Tokens, certificates and credentials by themselves: what is written is read, what is wrong is
named."""

from __future__ import annotations

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.net.identity.authority import SLACK, Authority, AuthorityError, public_key_of
from shoal.net.identity.credential import (
    Credential,
    CredentialError,
    load_key,
    new_key,
    request_of,
)
from shoal.net.identity.names import Party, PartyRole, dns_name, party_of, uri_of
from shoal.net.identity.token import Token, TokenError

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
DAY = timedelta(days=1)
PEER = Party(PartyRole.PEER, "home-1")
SUBJECTS = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\Z")
AUTHORITY = Authority.new(NOW)


# ---------------------------------------------------------------- tokens


@given(st.binary(min_size=32, max_size=32))
def test_a_token_is_read_as_it_was_written(fingerprint):
    token = Token.new(fingerprint)
    assert Token.parse(str(token)) == token
    assert Token.parse(f"  {str(token).upper()}\n") == token
    assert token.secret.hex() not in repr(token)


@settings(max_examples=500)
@given(st.data())
def test_no_slip_of_the_hand_gives_another_token(data):
    text = str(AUTHORITY.token())
    at = data.draw(st.integers(0, len(text) - 1))
    kind = data.draw(st.sampled_from(["change", "drop", "double", "cut"]))
    other = data.draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz0123456789.-"))
    wrong = {
        "change": text[:at] + other + text[at + 1 :],
        "drop": text[:at] + text[at + 1 :],
        "double": text[:at] + text[at] + text[at:],
        "cut": text[:at],
    }[kind]
    if wrong != text:
        with pytest.raises(TokenError):
            Token.parse(wrong)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: "", "starts with ''"),
        (lambda t: t.replace("shl1", "abc1"), "starts with"),
        (lambda t: t.replace("shl1", "shl9"), "install the version of shoal"),
        (lambda t: t.rpartition(".")[0], "3 parts"),
        (lambda t: t.replace(t.split(".")[1], t.split(".")[1][:-1]), "the authority's fingerprint"),
        (lambda t: t.replace(t.split(".")[2], "1" + t.split(".")[2][1:]), "the secret"),
        (lambda t: t.replace(t.split(".")[2], "é" + t.split(".")[2][1:]), "the secret"),
        (lambda t: t[:-1] + ("a" if t[-1] != "a" else "b"), "check does not fit"),
    ],
)
def test_a_wrong_token_says_which_part(change, said):
    with pytest.raises(TokenError, match=said):
        Token.parse(change(str(AUTHORITY.token())))


# ---------------------------------------------------------------- names


@given(SUBJECTS, SUBJECTS)
def test_two_subjects_never_prove_the_same_name(a, b):
    assert (dns_name(PartyRole.PEER, a) == dns_name(PartyRole.PEER, b)) == (a == b)
    assert dns_name(PartyRole.PEER, a) != dns_name(PartyRole.SUBMITTER, a)
    assert all(len(label) <= 63 for label in dns_name(PartyRole.PEER, a).split("."))


@given(st.sampled_from(PartyRole), SUBJECTS)
def test_who_is_written_is_read(role, subject):
    party = Party(role, subject)
    assert party_of({"peer_uri": [uri_of(party).encode()]}) == party


@given(st.lists(st.binary(max_size=60), max_size=3))
def test_nobody_is_read_from_anything_else(uris):
    found = party_of({"peer_uri": uris})
    assert found is None or uris == [uri_of(found).encode()]


# ---------------------------------------------------------------- certificates


def leaf_of(pem: bytes) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem)


def test_a_certificate_says_who_and_until_when_whatever_the_request_says():
    key = new_key()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "the operator")])
    builder = x509.CertificateSigningRequestBuilder().subject_name(name)
    uri = x509.UniformResourceIdentifier("shoal:operator:me")
    builder = builder.add_extension(x509.SubjectAlternativeName([uri]), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(True, None), critical=True)
    request = builder.sign(key, hashes.SHA256())
    der = request.public_bytes(serialization.Encoding.DER)
    pem = AUTHORITY.sign(der, PEER, NOW, DAY)
    leaf = leaf_of(pem)
    leaf.verify_directly_issued_by(leaf_of(AUTHORITY.pem))
    assert leaf.public_key() == key.public_key()
    assert Credential(b"", pem, AUTHORITY.pem).party == PEER
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert leaf.not_valid_after_utc == NOW + DAY
    assert leaf.not_valid_before_utc == NOW - SLACK


def test_a_certificate_never_outlives_its_authority():
    made = AUTHORITY.credential(PEER, NOW, timedelta.max)
    assert made.ends == leaf_of(AUTHORITY.pem).not_valid_after_utc


@pytest.mark.parametrize(
    ("der", "said"),
    [
        (b"", "cannot be read"),
        (b"\x30\x82" + bytes(100), "cannot be read"),
        (bytes(5000), "at most 4096"),
    ],
)
def test_what_is_no_request_is_refused(der, said):
    with pytest.raises(AuthorityError, match=said):
        public_key_of(der)


@given(st.binary(max_size=300))
def test_noise_is_no_request(noise):
    with pytest.raises(AuthorityError):
        public_key_of(noise)


def test_a_request_by_another_hand_or_kind_of_key_is_refused():
    der = bytearray(request_of(new_key()))
    der[-1] ^= 1
    with pytest.raises(AuthorityError):
        public_key_of(bytes(der))
    for key, algorithm in (
        (
            generate_private_key(SECP384R1()),
            hashes.SHA256(),
        ),
        (Ed25519PrivateKey.generate(), None),
    ):
        builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
        request = builder.sign(key, algorithm).public_bytes(serialization.Encoding.DER)
        with pytest.raises(AuthorityError, match="expected P-256"):
            public_key_of(request)


# ---------------------------------------------------------------- on disk


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_an_authority_is_the_same_after_a_restart_and_its_key_is_its_owners(tmp_path):
    folder = tmp_path / "authority"
    first, second = Authority.open(folder, NOW), Authority.open(folder, NOW + DAY)
    assert first.fingerprint == second.fingerprint
    assert mode(folder / "authority.key") == 0o600
    assert mode(folder) == 0o700


def test_an_authority_that_is_damaged_or_over_says_so_and_stays_as_it_is(tmp_path):
    folder = tmp_path / "authority"
    Authority.open(folder, NOW)
    with pytest.raises(AuthorityError, match="ended on"):
        Authority.open(folder, NOW + 4000 * DAY)
    (folder / "authority.crt").write_bytes(Authority.new(NOW).pem)
    with pytest.raises(AuthorityError, match="is not the key of"):
        Authority.open(folder, NOW)
    (folder / "authority.crt").unlink()
    with pytest.raises(AuthorityError, match="no usable authority"):
        Authority.open(folder, NOW)
    assert (folder / "authority.key").exists()


@pytest.mark.parametrize("gone", ["authority.key", "authority.crt"])
def test_an_authority_that_lost_one_of_its_files_is_never_made_anew(tmp_path, gone):
    folder = tmp_path / "authority"
    Authority.open(folder, NOW)
    (folder / gone).unlink()
    left = [(p.name, p.read_bytes()) for p in folder.iterdir()]
    with pytest.raises(AuthorityError, match=rf"{gone} is missing, so there is no usable"):
        Authority.open(folder, NOW)
    assert [(p.name, p.read_bytes()) for p in folder.iterdir()] == left


def test_making_an_authority_that_a_crash_ended_leaves_none(tmp_path, monkeypatch):
    folder = tmp_path / "authority"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: exec("raise KeyboardInterrupt"))
        with pytest.raises(KeyboardInterrupt):
            Authority.open(folder, NOW)
    assert Authority.open(folder, NOW).fingerprint == Authority.open(folder, NOW).fingerprint


def test_a_credential_is_kept_and_read_for_its_owner_only(tmp_path):
    made = AUTHORITY.credential(PEER, NOW, DAY)
    made.save(tmp_path / "me")
    found = Credential.load(tmp_path / "me")
    assert found is not None
    assert found.party == PEER
    assert mode(tmp_path / "me" / "key.pem") == 0o600
    assert found.renew_at() == NOW - SLACK + (DAY + SLACK) / 2
    assert Credential.load(tmp_path / "nobody") is None
    assert "PRIVATE" not in repr(found)


def test_a_certificate_for_another_key_is_said(tmp_path):
    AUTHORITY.credential(PEER, NOW, DAY).save(tmp_path)
    other = AUTHORITY.credential(PEER, NOW, DAY)
    (tmp_path / "certificate.pem").write_bytes(other.certificate)
    with pytest.raises(CredentialError, match="is for another key"):
        Credential.load(tmp_path)
    (tmp_path / "key.pem").write_bytes(b"nonsense")
    with pytest.raises(CredentialError, match="is no key"):
        load_key(tmp_path)
