//! The fabric for speed tests: what the conformance kit does not ask of it.

use kvx_core::ErrorKind;
use kvx_core::backend::{Event, Events, Outcome, Submit, TransferBackend as _};
use kvx_core::handshake::Handshake as _;
use kvx_core::id::{PeerId, TransferId};
use kvx_core::memory::{MemoryRegistry as _, Region};
use kvx_core::transfer::{Mode, PostedSegment};
use kvx_mock::{Loopback, LoopbackBackend, Preset};

fn meet(first: &LoopbackBackend, second: &LoopbackBackend) -> kvx_core::Result<(PeerId, PeerId)> {
    let (at_second, reply) = second.accept(&first.offer()?)?;
    let (at_first, completion) = first.complete(&reply)?;
    assert_eq!(second.finish(&completion)?, at_second);
    Ok((at_first, at_second))
}

fn events(backend: &LoopbackBackend) -> Vec<Event> {
    let mut events = Events::with_limit(10_000);
    backend.poll(&mut events);
    events.drain().collect()
}

#[test]
fn everything_has_happened_when_submit_returns() {
    let loopback = Loopback::new().unwrap();
    let (first, second) = (loopback.backend("1").unwrap(), loopback.backend("2").unwrap());
    let (peer, _) = meet(&first, &second).unwrap();
    let (source, target) = (Region::host(64).unwrap(), Region::host(64).unwrap());
    source.write_at(0, &[7; 64]).unwrap();
    let local = first.register(&source).unwrap();
    let key = second.key_blob(second.register(&target).unwrap()).unwrap();
    let remote = first.import_key(peer, &key).unwrap();
    let segment = PostedSegment { local, remote, local_offset: 3, remote_offset: 5, bytes: 50 };
    let submitted = first.submit(TransferId(1), peer, Mode::Write, &[segment], Some(b"x")).unwrap();
    assert_eq!(submitted, Submit::Submitted);
    let mut bytes = [0; 64];
    target.read_at(0, &mut bytes).unwrap();
    let expected: [u8; 64] = std::array::from_fn(|i| if (5..55).contains(&i) { 7 } else { 0 });
    assert_eq!(bytes, expected);
    let one = first.cancel(TransferId(1)).unwrap_err();
    assert_eq!(one.kind(), ErrorKind::Misuse, "it has settled");
    let [Event::Settled { id: TransferId(1), outcome: Outcome::Done { .. } }] = &events(&first)[..]
    else {
        panic!("not done")
    };
    let [Event::Notified { payload, .. }] = &events(&second)[..] else { panic!("not notified") };
    assert_eq!(payload, b"x");
}

/// What neither side polls is bounded: by full for whoever posts, and by full for the peers of whoever is told.
#[test]
fn whoever_does_not_poll_does_not_grow() {
    let loopback = Loopback::new().unwrap();
    let (first, second) = (loopback.backend("1").unwrap(), loopback.backend("2").unwrap());
    let (peer, _) = meet(&first, &second).unwrap();
    let most = first.capabilities().limits.max_in_flight as usize;
    let post = |id: usize| {
        first.submit(TransferId(id as u64), peer, Mode::Write, &[], Some(b"note")).unwrap()
    };
    for id in 0..most {
        assert_eq!(post(id), Submit::Submitted);
    }
    assert_eq!(post(most), Submit::Full, "the poster does not poll");
    let mut posted = most;
    loop {
        assert!(events(&first).len() <= most);
        if post(posted) == Submit::Full {
            break;
        }
        posted += 1;
    }
    assert_eq!(posted, Preset::MOST_NOTIFICATIONS, "the peer does not poll");
    assert_eq!(events(&second).len(), posted);
    assert_eq!(post(posted), Submit::Submitted);
}

#[test]
fn connections_that_ended_are_bounded_too() {
    let loopback = Loopback::new().unwrap();
    let first = loopback.backend("1").unwrap();
    let mut met = 0;
    let error = loop {
        let second = loopback.backend("2").unwrap();
        match meet(&first, &second) {
            Ok(_) => met += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(met, Preset::MOST_NOTIFICATIONS);
    assert_eq!(error.kind(), ErrorKind::Resources);
    assert!(error.to_string().contains("poll this backend"), "{error}");
    assert_eq!(events(&first).len(), met);
    meet(&first, &loopback.backend("2").unwrap()).unwrap();
}

#[test]
fn faults_are_by_name() {
    let loopback = Loopback::new().unwrap();
    for error in [loopback.kill("x"), loopback.stop("x"), loopback.resume("x")] {
        let error = error.unwrap_err();
        assert!(error.kind() == ErrorKind::Misuse && error.to_string().contains("\"x\""));
    }
}
