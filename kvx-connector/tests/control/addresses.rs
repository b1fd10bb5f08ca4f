//! Where one listens, and whom one dials.

use kvx_connector::control::{Allowed, Control, Security};
use kvx_core::card::EngineName;
use kvx_core::{ErrorKind, Retry};

use crate::kit::{Side, config, host, key, start};

/// Known failure 117 (sglang#24064, dynamo#3019): numbers of both kinds and names, all the same to whoever is told of a session.
#[test]
fn addresses_of_every_kind_are_listened_at_and_dialled() {
    for (listens, dials) in [
        ("127.0.0.1:0", "127.0.0.1"),
        ("127.0.0.1:0", "localhost"),
        ("[::1]:0", "[::1]"),
        ("[::1]:0", "localhost"),
        ("localhost:0", "127.0.0.1"),
        ("localhost:0", "[::1]"),
        ("localhost:0", "localhost"),
        ("LocalHost.:0", "localhost"),
        ("0.0.0.0:0", "127.0.0.1"),
        ("[::]:0", "[::1]"),
        ("[::]:0", "127.0.0.1"),
        ("[::ffff:127.0.0.1]:0", "127.0.0.1"),
    ] {
        let (mut prefill, mut decode) = (start("prefill", key()), start("decode", key()));
        let port = prefill.listen(listens).port();
        let address = format!("{dials}:{port}").parse().unwrap();
        let session = decode.control.dial(&address, None).unwrap();
        let (_, remote) = prefill.up();
        assert_eq!(remote.engine.as_str(), "decode", "{listens} {dials}");
        let (up, remote) = decode.up();
        assert_eq!((up, remote.engine.as_str()), (session, "prefill"), "{listens} {dials}");
        let [info] = decode.control.sessions().try_into().unwrap();
        assert_eq!(info.dialled, Some(address));
    }
}

/// Known failure 77 (vllm#20965, ray PR#65756): a port that another engine of the host has.
#[test]
fn a_port_that_is_taken_is_named() {
    for text in ["127.0.0.1", "[::1]", "localhost"] {
        let (one, other) = (start("prefill", key()), start("decode", key()));
        let address = one.listen(&format!("{text}:0"));
        let error = other.control.listen(&address).unwrap_err();
        assert_eq!((error.kind(), error.retry()), (ErrorKind::Config, Retry::Backoff));
        assert!(error.to_string().contains(&format!(":{} already", address.port())), "{error}");
        assert!(error.remedy().unwrap().contains("a port of its own"), "{error}");
        // Also where one of them listens everywhere.
        if text == "127.0.0.1" {
            let everywhere = format!("0.0.0.0:{}", address.port()).parse().unwrap();
            other.control.listen(&everywhere).unwrap_err();
        }
        drop(one);
        other.control.listen(&address).unwrap();
    }
    let error = start("a", key()).control.listen(&"192.0.2.1:0".parse().unwrap()).unwrap_err();
    assert!(error.to_string().contains("192.0.2.1"), "{error}");
}

/// Known failure 76 (vllm#27083): another engine listens where one wanted this one.
#[test]
fn another_engine_than_expected_is_named_with_its_address() {
    let (mut prefill, mut decode) = (start("prefill-2", key()), start("decode", key()));
    let address = prefill.listen("127.0.0.1:0");
    let wanted = EngineName::new("prefill-1").unwrap();
    let session = decode.control.dial(&address, Some(wanted)).unwrap();
    let why = decode.down(session);
    assert_eq!(why.kind(), ErrorKind::Peer);
    let text = why.to_string();
    for part in ["prefill-1", "prefill-2", &address.to_string()] {
        assert!(text.contains(part), "{text}");
    }
    // Whoever was dialled is told, and serves whoever means it.
    let (there, _) = prefill.up();
    assert!(prefill.down(there).to_string().contains("prefill-1"));
    let wanted = EngineName::new("prefill-2").unwrap();
    decode.control.dial(&address, Some(wanted)).unwrap();
    decode.up();
}

/// Known failure 116 (vllm PR#51504): an address that came with a request is dialled only where it may be.
#[test]
fn an_address_that_is_not_allowed_is_not_dialled() {
    let victim = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    victim.set_nonblocking(true).unwrap();
    let address = victim.local_addr().unwrap().to_string().parse().unwrap();
    let refused = |control: &Control| {
        let error = control.dial(&address, None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains(&address.to_string()), "{error}");
        assert!(error.remedy().is_some());
    };
    // With a list: only what is on it.
    let mut listed = config("decode", key());
    listed.allowed =
        Some([host("10.0.0.1:1"), Allowed::Address("127.0.0.1:1".parse().unwrap())].into());
    refused(&Side::new(listed).control);
    // Without a key: nothing, unless listed.
    refused(&start("decode", Security::plaintext_on_loopback()).control);
    assert!(victim.accept().is_err(), "nobody has connected");
    let mut listed = config("decode", Security::plaintext_on_loopback());
    listed.allowed = Some([Allowed::Address(address.clone())].into());
    let side = Side::new(listed);
    side.control.dial(&address, None).unwrap();
    // With a key and without a list: anything.
    start("decode", key()).control.dial(&address, None).unwrap();
    for nobody in ["0.0.0.0:1", "[::]:1", "127.0.0.1:0"] {
        start("decode", key()).control.dial(&nobody.parse().unwrap(), None).unwrap_err();
    }
}

#[test]
fn where_nobody_listens_is_said_at_once() {
    let mut decode = start("decode", key());
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    for text in [free.to_string(), format!("localhost:{}", free.port())] {
        let session = decode.control.dial(&text.parse().unwrap(), None).unwrap();
        let why = decode.down(session);
        assert_eq!((why.kind(), why.retry()), (ErrorKind::Peer, Retry::Backoff));
        assert!(why.to_string().contains(&text), "{why}");
    }
    let stats = decode.control.stats();
    assert_eq!((stats.unreachable, stats.dialling), (2, 0));
}
