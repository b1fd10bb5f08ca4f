//! Closing, and letting go without closing.

use super::super::Inner;
use super::*;
use crate::error::ErrorKind;

#[test]
fn closing_settles_everything_and_refuses_the_rest() {
    let setup = Setup::one_by_one(1);
    let posted = setup.write(&segments(2), Some(b"n"));
    let queued = setup.write(&segments(1), None);
    setup.fake.notify(setup.peer, b"early");
    setup.port.poll();
    setup.fake.notify(setup.peer, b"late");
    block_on(setup.port.close()).unwrap();
    for transfer in [posted, queued] {
        assert_eq!(block_on(transfer).unwrap_err().kind(), ErrorKind::Closed);
    }
    let inside = setup.fake.lock();
    assert_eq!((inside.posts.len(), inside.closes), (1, 1));
    assert_eq!(inside.severed, [setup.peer]);
    drop(inside);
    assert_eq!(setup.port.stats().discarded_notifications, 1);
    assert_eq!(block_on(setup.port.notified()).unwrap().1, b"early");
    assert_eq!(block_on(setup.port.peer_down()).unwrap().0, setup.peer);

    let handshake = HandshakeBytes::new(vec![1, 0]).unwrap();
    let region = Region::host(1).unwrap();
    let refused = [
        setup.port.transfer(setup.peer, Mode::Read, &setup.set, &segments(1), None).err(),
        setup.port.register(&region).err(),
        setup.port.offer().err(),
        setup.port.accept(&handshake).err(),
        setup.port.complete(&handshake).err(),
        setup.port.finish(&handshake).err(),
        setup.port.sever(setup.peer).err(),
        setup.port.peer_info(setup.peer).err(),
        setup.port.wait_notified(std::time::Duration::ZERO).err(),
        block_on(setup.port.notified()).err(),
        block_on(setup.port.peer_down()).err(),
    ];
    for error in refused {
        assert_eq!(error.unwrap().kind(), ErrorKind::Closed);
    }
    assert_eq!(setup.port.key_blob(setup.id).unwrap_err().kind(), ErrorKind::Misuse);
    block_on(setup.port.close()).unwrap();
    assert_eq!(setup.fake.lock().closes, 1);
}

#[test]
fn closing_does_not_wait_for_notifications_to_be_taken() {
    let setup = Setup::new();
    let many = super::super::KEPT_NOTIFICATIONS + 500;
    (0..many).for_each(|_| setup.fake.notify(setup.peer, b"x"));
    while setup.port.poll() > 0 {}
    let kept = setup.port.inner.lock().notifications.len();
    block_on(setup.port.close()).unwrap();
    assert_eq!(setup.port.stats().discarded_notifications, (many - kept) as u64);
    assert_eq!(std::iter::from_fn(|| setup.port.next_notification()).count(), kept);
}

/// A backend that breaks its contract does not hang the caller, and memory that may be in use is not let go.
#[test]
fn what_never_settles_is_held_and_said() {
    let setup = Setup::new();
    setup.fake.lock().manual_sever = true;
    let mut transfer = setup.write(&segments(1), None);
    let error = block_on(setup.port.close()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fabric);
    assert!(error.to_string().contains("transfers=1"), "{error}");
    assert_eq!(setup.port.inner.lock().transfers.len(), 1);
    assert!(setup.port.deregister(setup.id).is_err());
    setup.fake.done(setup.fake.held()[0]);
    assert!(transfer.try_result().unwrap().is_ok());
}

#[test]
fn a_transfer_keeps_its_port_and_the_port_its_backend() {
    let Setup { fake, port, peer, set, .. } = Setup::new();
    let mut transfer = port.transfer(peer, Mode::Read, &set, &segments(1), None).unwrap();
    let inner: std::sync::Weak<Inner> = Arc::downgrade(&port.inner);
    drop(port);
    fake.done(fake.held()[0]);
    assert!(transfer.try_result().unwrap().is_ok());
    assert_eq!(Arc::strong_count(&fake), 2);
    drop(transfer);
    assert!(inner.upgrade().is_none());
    assert_eq!(Arc::strong_count(&fake), 1);
}
