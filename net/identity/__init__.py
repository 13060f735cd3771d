"""Who is who: the broker's authority, the tokens that it gives out, and what each party keeps.

names        how subjects and roles are written into certificates
token        the text that a peer's owner pastes: whom to trust, and the right to join
authority    the broker's own: it signs certificates, and says where the broker is (discovery/)
credential   a key with its certificate, on disk and in gRPC's terms
signing      statements under such a key, and who signed one
statements   the same as messages have them
receipts     of what peers send in rounds, and when two of them prove a lie
diagnosis    why there is no TLS connection to a broker, in words
enroll       the first contact: from a token to a credential, and its renewal

The authority signs with Ed25519; everybody else has a P-256 key, as gRPC takes no Ed25519 leaf.
"""
