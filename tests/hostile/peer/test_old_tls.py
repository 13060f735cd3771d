"""Which TLS the ports of a peer take."""

from __future__ import annotations

import asyncio
import ssl
import warnings
from pathlib import Path

import pytest

from shoal.net.identity.names import PartyRole, dns_name
from shoal.tests.broker.service.door.test_relay import network

from .test_links import joined


@pytest.mark.parametrize("most", ["TLSv1_1", "TLSv1_2", "TLSv1_3"])
async def test_a_peers_port_takes_what_it_says(most: str, tmp_path: Path) -> None:
    async with network("a") as (broker, (a,)), joined(broker, tmp_path, "b") as b:
        (tmp_path / "key.pem").write_bytes(a.credential.key)
        (tmp_path / "chain.pem").write_bytes(a.credential.certificate)
        context = ssl.create_default_context(cadata=a.credential.authority.decode())
        context.load_cert_chain(tmp_path / "chain.pem", tmp_path / "key.pem")
        context.set_alpn_protocols(["h2"])
        context.set_ciphers("DEFAULT@SECLEVEL=0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of what is tried here
            context.minimum_version = ssl.TLSVersion.TLSv1
            context.maximum_version = ssl.TLSVersion[most]
        host, _, port = b.listens.rpartition(":")
        name = dns_name(PartyRole.PEER, b.me.peer)
        try:
            _, writer = await asyncio.open_connection(
                host, int(port), ssl=context, server_hostname=name
            )
        except (OSError, ssl.SSLError):
            assert most == "TLSv1_1"
            return
        assert writer.get_extra_info("ssl_object").version() == most.replace("_", ".")
        writer.close()
