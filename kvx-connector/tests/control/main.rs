//! The control channel over real sockets.

#[cfg(test)]
mod kit;

#[cfg(test)]
mod addresses;
#[cfg(test)]
mod bounds;
#[cfg(test)]
mod lives;
#[cfg(test)]
mod strangers;

use std::time::Duration;

use kvx_connector::control::{ControlEvent, Security, Sent};
use kvx_core::ErrorKind;
use kvx_core::card::{FeatureSet, SchemaRange};

use kit::{Side, config, key, start, until};

#[test]
fn messages_go_both_ways_in_order() {
    let (mut prefill, mut decode) = (start("prefill", key()), start("decode", key()));
    let (there, here) = prefill.joined(&mut decode);
    for round in 0..100_u8 {
        let long = vec![round; 1 + 4000 * usize::from(round)];
        assert_eq!(decode.control.send(here, &long).unwrap(), Sent::Sent);
        assert_eq!(prefill.control.send(there, &round.to_le_bytes()).unwrap(), Sent::Sent);
        assert_eq!(prefill.message(there), long);
        assert_eq!(decode.message(here), round.to_le_bytes());
    }
    let (sent, received) = (decode.control.stats(), prefill.control.stats());
    assert_eq!((sent.messages_sent, received.messages_received), (100, 100));
    assert_eq!((sent.up, received.up, received.half_open, sent.dialling), (1, 1, 0, 0));
}

#[test]
fn what_is_sent_before_it_is_up_waits() {
    let (mut prefill, decode) = (start("prefill", key()), start("decode", key()));
    let address = prefill.listen("127.0.0.1:0");
    let session = decode.control.dial(&address, None).unwrap();
    for number in 0..10 {
        assert_eq!(decode.control.send(session, &[number]).unwrap(), Sent::Sent);
    }
    let (there, ..) = prefill.up();
    for number in 0..10 {
        assert_eq!(prefill.message(there), [number]);
    }
}

#[test]
fn a_closed_session_says_all_it_had_and_ends_on_both_sides() {
    let (mut prefill, mut decode) = (start("prefill", key()), start("decode", key()));
    let (there, here) = prefill.joined(&mut decode);
    let last = vec![3; 1 << 20];
    assert_eq!(decode.control.send(here, &last).unwrap(), Sent::Sent);
    decode.control.close(here);
    assert_eq!(prefill.message(there), last);
    let why = prefill.down(there);
    assert_eq!(why.kind(), ErrorKind::Closed);
    assert!(why.to_string().contains("the peer closed the session"), "{why}");
    let why = decode.down(here);
    assert!(why.to_string().contains("closed on this side"), "{why}");
    let error = decode.control.send(here, b"x").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
    // Nothing more of it is heard.
    decode.control.close(here);
    decode.nothing_for(Duration::from_millis(50));
}

#[test]
fn a_whole_channel_that_stops_says_so() {
    let (mut prefill, mut decode) = (start("prefill", key()), start("decode", key()));
    let (_, here) = prefill.joined(&mut decode);
    prefill.control.shutdown();
    assert!(decode.down(here).to_string().contains("is stopping"));
}

#[test]
fn both_sides_are_told_of_versions_that_do_not_meet_and_others_are_served() {
    let mut prefill = start("prefill", key());
    let address = prefill.listen("127.0.0.1:0");
    let required = FeatureSet::from_bits(1 << 40);
    for field in ["schema", "features"] {
        let mut newer = config("decode", key());
        if field == "schema" {
            newer.versions.schemas = SchemaRange::new(2, 3).unwrap();
        } else {
            (newer.versions.required, newer.versions.known) = (required, required);
        }
        let mut decode = Side::new(newer);
        let session = decode.control.dial(&address, None).unwrap();
        let why = decode.down(session);
        let mismatch = why.as_mismatch().unwrap();
        assert_eq!(mismatch.field, field);
        assert!(why.to_string().contains(&address.to_string()), "{why}");
    }
    until(&prefill.control, "counted", |it| it.stats().refused == 2);
    prefill.joined(&mut start("decode", key()));
}

#[test]
fn who_is_there_is_known_and_how_it_is() {
    let (mut prefill, mut decode) = (start("prefill", key()), start("decode", key()));
    let (there, here) = prefill.joined(&mut decode);
    let [at_prefill] = prefill.control.sessions().try_into().unwrap();
    let [at_decode] = decode.control.sessions().try_into().unwrap();
    assert_eq!((at_prefill.session, at_decode.session), (there, here));
    assert_eq!(at_prefill.remote.engine.as_str(), "decode");
    assert_eq!(at_decode.remote.engine.as_str(), "prefill");
    assert!(at_prefill.dialled.is_none() && at_decode.dialled.is_some());
    assert!(at_prefill.peer.ip().is_loopback());
    assert!(at_prefill.silent_for <= at_prefill.up_for + Duration::from_secs(1));
}

#[test]
fn plaintext_is_for_loopback_unless_asked_for_twice() {
    let once = start("prefill", Security::plaintext_on_loopback());
    let error = once.control.listen(&"0.0.0.0:0".parse().unwrap()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("plaintext beyond loopback"), "{error}");
    let mut listed = config("prefill", Security::plaintext_on_loopback());
    listed.allowed = Some([kit::host("10.0.0.1:1"), kit::host("127.0.0.1:1")].into());
    let mut listed = Side::new(listed);
    let error = listed.control.dial(&"10.0.0.1:5600".parse().unwrap(), None).unwrap_err();
    assert!(error.to_string().contains("plaintext beyond loopback"), "{error}");
    let address = once.listen("127.0.0.1:0");
    let session = listed.control.dial(&address, None).unwrap();
    listed.up();
    listed.control.close(session);

    let twice = start("prefill", Security::plaintext_on_loopback().and_beyond_loopback());
    twice.listen("0.0.0.0:0");
    start("prefill", key()).listen("0.0.0.0:0");
}

#[test]
fn events_ring_a_descriptor() {
    use rustix::event::{PollFd, PollFlags, Timespec};
    let readable = |side: &Side| {
        let mut fds = [PollFd::new(&side.control, PollFlags::IN)];
        rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
    };
    let (mut prefill, mut decode) = (start("prefill", key()), start("decode", key()));
    let (there, here) = prefill.joined(&mut decode);
    assert!(!readable(&prefill) && !prefill.control.wait(Duration::from_millis(20)).unwrap());
    for _ in 0..3 {
        assert_eq!(decode.control.send(here, b"x").unwrap(), Sent::Sent);
        assert!(prefill.control.wait(Duration::from_secs(10)).unwrap());
        assert!(readable(&prefill));
        let mut events = Vec::new();
        prefill.control.poll(&mut events);
        assert!(!readable(&prefill));
        assert!(
            matches!(&events[..], [ControlEvent::Message { session, .. }] if *session == there)
        );
    }
}
