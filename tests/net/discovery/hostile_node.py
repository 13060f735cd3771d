"""A hostile node of a swarm's DHT, as a program: python hostile_node.py WAY KEY HONEST ENDS_S

It asks the node at WAY to keep, under KEY, garbage, a dictionary with garbage, and the record
HONEST (base64) with a far later end; and that record as it is, under a subkey and under another
key. It prints what was accepted, as JSON, and then answers everybody who looks with an empty
dictionary that ends last of all, until its input ends.
"""

import asyncio
import base64
import json
import sys
import time

from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2P, PeerID
from hivemind.utils import MSGPackSerializer


async def main(way: str, key: str, honest: bytes, ends_s: float) -> None:
    dht = await DHTNode.create(
        initial_peers=[way], host_maddrs=["/ip4/127.0.0.1/tcp/0"], strict=False, nat_port_map=False
    )
    assert isinstance(dht.p2p, P2P)
    there, name = PeerID.from_base58(way.rpartition("/")[2]), DHTID.generate(key)
    far = time.time() + 10 * 365 * 86400
    nothing = DictionaryDHTValue()
    nothing.latest_expiration_time = far
    garbage = DictionaryDHTValue()
    garbage.store("x", b"garbage", far)
    packed = MSGPackSerializer.dumps
    accepted = []
    for at, value, end_s, subkey in (
        (name, packed(b"garbage"), far, None),
        (name, b"\xff\xff", far, None),
        (name, packed(honest), far, None),  # an old record for ever
        (name, garbage, far, None),
        (name, packed(honest), ends_s, "subkey"),
        (DHTID.generate("another key"), packed(honest), ends_s, None),
    ):
        answer = await dht.protocol.call_store(there, [at], [value], end_s, [subkey])
        accepted.append(answer and answer[0])
    await dht.protocol.call_store(there, [name], [nothing], far)  # empty: nothing is to be kept
    dht.protocol.storage.data.clear()
    dht.protocol.storage.store(name, nothing, far)
    print(json.dumps(accepted), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await dht.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], base64.b64decode(sys.argv[3]), float(sys.argv[4])))
