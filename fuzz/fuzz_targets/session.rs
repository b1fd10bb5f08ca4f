//! Any bytes, in pieces of any length, as what comes over a session of the control channel: no panic, and no more is kept than came.
//! The first byte says whether there is a key, and who dialled; each piece begins with its length.

#![no_main]

use std::sync::Arc;

use kvx_connector::control::session::{Local, Session};
use kvx_connector::control::{Key, RemoteIdentity, Security, Versions};
use kvx_core::card::EngineName;
use kvx_core::id::Incarnation;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((how, mut rest)) = bytes.split_first() else { return };
    let security = match how & 1 {
        0 => Security::plaintext_on_loopback(),
        _ => Security::with_key(Key::from_bytes([7; 32])),
    };
    let local = Arc::new(Local {
        identity: RemoteIdentity {
            engine: EngineName::new("fuzzed").expect("a name"),
            incarnation: Incarnation::from_bytes([1; 16]),
            rank: None,
        },
        versions: Versions::CURRENT,
        security,
        max_message_bytes: 1 << 16,
    });
    let mut session = match how & 2 {
        0 => Session::accept(&local),
        _ => Session::dial(&local, None).expect("a session"),
    };
    let mut events = Vec::new();
    while let Some((length, others)) = rest.split_first() {
        let (piece, others) = others.split_at(usize::from(*length).min(others.len()));
        rest = others;
        let over = session.is_over();
        let before = events.len();
        let result = session.receive(piece, &mut events);
        assert!(!over || (result.is_ok() && events.len() == before), "it is over");
        assert_eq!(session.is_over(), over || result.is_err());
        session.sent(session.output().len());
    }
});
