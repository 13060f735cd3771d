"""Sums of a round of which nobody sees an addend: pairwise masks (Bonawitz et al. 2017, 1611.04482)
over fixed-point contributions, and a mask of its own on each, which is lifted when the sum is at
all members. `round_keys` has what members tell each other, `pair_masks` what is added,
`secure_member` one member's part in a round, without I/O, and `masked_sums` brings it and the
messages of rounds together. Beside that, and without masks too, `attempt_receipts` signs what a
peer gives in rounds. `dag/rounds/secret_sharing.py` is how a secret is shared by threshold,
and `broker/rounds/unmasking.py` the broker's part.

What goes where, in attempt k at a round with the members M, n of them, and the threshold
t = n // 2 + 1; the broker passes on what is signed or sealed and reads nothing of it:

    1  each -> broker       an X25519 key for this round, signed
    2  broker -> all of M   the signed keys of M (the roster); whoever finds them wrong says so
    3  each -> broker -> v  for every v of M a share of its own mask b, which is fresh, and a
                            commitment to b, sealed for v
       each -> aggregators  of every part, contribution + PRG(b) + Σ ± PRG(pair)   modulo 2^64
    4  aggregators -> all   the masked sum of a part, once all of M have given it
    5  each -> broker       it holds all masked sums and one share of every b
    6  broker               when all of M hold: writes down that attempt k is being unmasked
       broker -> all of M   reveal
    7  each -> broker       its shares of every b; from here on it gives nothing to another attempt
    8  broker -> all        every b, from the shares of t members: each lifts the masks off the sums
                            and applies their mean; then as in any round

Pairwise masks cancel in the sum of all of M and in no other, so that no key is ever revealed, and
one set of members is all that can come of an attempt. Who is lost in 2 to 5, a member or the
broker, costs an attempt: k + 1 has other masks, and those of k are never lifted. From 6 on there is
no other attempt: t of n members are enough, and a broker that was started again asks for the same
shares (docs/federated-privacy.md, "Sums with masks").

Two attempts whose members differ by one cannot both be unmasked, even if members are told different
things: each takes more than half of its members, so somebody would have to reveal in both, and
nobody does.
"""
