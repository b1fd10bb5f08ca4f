//! The notification: once, last, and only after all data.

use proptest::prelude::*;

use super::*;
use crate::backend::Outcome;
use crate::capability::Ordering;
use crate::id::TransferId;

/// Posts with a notification, so far.
fn told(fake: &Fake) -> Vec<TransferId> {
    let posts = fake.posts();
    posts.iter().filter(|post| post.notify.is_some()).map(|post| post.id).collect()
}

#[test]
fn with_one_batch_it_rides_on_it() {
    let setup = Setup::new();
    let transfer = setup.write(&segments(5), Some(b"one"));
    let posts = setup.fake.posts();
    assert_eq!(posts.len(), 1);
    assert_eq!(posts[0].notify.as_deref(), Some(&b"one"[..]));
    assert_eq!((posts[0].segments.len(), posts[0].mode), (5, Mode::Write));
    assert_eq!(posts[0].peer, setup.peer);
    drop(transfer);
}

#[test]
fn it_does_not_ride_behind_data_in_flight_whatever_the_ordering() {
    for ordering in [Ordering::PerPeer, Ordering::Unordered] {
        let setup = Setup::with(|capabilities| {
            capabilities.limits.max_batch_segments = 2;
            capabilities.ordering = ordering;
        });
        let mut transfer = setup.write(&segments(5), Some(b"n"));
        let held = setup.fake.held();
        assert_eq!(held.len(), 2, "the last batch waits");
        setup.fake.done(held[1]);
        setup.port.poll();
        assert_eq!(told(&setup.fake), []);
        setup.fake.done(held[0]);
        setup.port.poll();
        let last = setup.fake.held();
        assert_eq!((last.len(), told(&setup.fake)), (1, last.clone()));
        setup.fake.done(last[0]);
        assert_eq!(transfer.try_result().unwrap().unwrap().batches, 3);
    }
}

#[test]
fn a_transfer_that_waits_to_notify_lets_others_pass() {
    let setup = Setup::one_by_one(8);
    let first = setup.write(&segments(2), Some(b"n"));
    let mut second = setup.write(&segments(1), Some(b"m"));
    assert_eq!(setup.fake.posts().len(), 2, "one batch of each");
    assert_eq!(told(&setup.fake).len(), 1, "the second's");
    setup.settle_all();
    assert!(second.try_result().unwrap().is_ok());
    assert_eq!(told(&setup.fake).len(), 2);
    drop(first);
}

/// Known failure 91 (nixl PR#349, PR#688): with everything inline the notification was lost, or sent twice.
#[test]
fn what_completes_inline_notifies_once() {
    for (count, say) in [(1, Say::Inline), (4, Say::Inline), (1, Say::Done), (4, Say::Done)] {
        let setup = Setup::one_by_one(2);
        setup.fake.always(say);
        let report = block_on(setup.write(&segments(count), Some(b"n"))).unwrap();
        assert_eq!(report.batches, count);
        let posts = setup.fake.posts();
        assert_eq!(told(&setup.fake), [posts.last().unwrap().id]);
    }
}

#[test]
fn a_batch_may_settle_before_its_call_returns() {
    // Within `submit` of the last batch, another thread settles and routes the one before it, and this one.
    let setup = Setup::new();
    setup.fake.script([Say::Inline]);
    let port = setup.port.clone();
    let mut first = setup.write(&segments(1), Some(b"n"));
    setup.fake.lock().in_submit = Some(Box::new(move || {
        port.poll();
    }));
    let mut second = setup.write(&segments(1), Some(b"n"));
    assert!(first.try_result().unwrap().is_ok());
    setup.settle_all();
    assert!(second.try_result().unwrap().is_ok());
    assert_eq!(told(&setup.fake).len(), 2);
}

/// What the fabric does next, in the order of the test's choice.
#[derive(Clone, Copy, Debug)]
enum Step {
    Done(usize),
    Fail(usize),
    Poll,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => any::<usize>().prop_map(Step::Done),
        1 => any::<usize>().prop_map(Step::Fail),
        4 => Just(Step::Poll),
    ]
}

fn say() -> impl Strategy<Value = Say> {
    prop_oneof![
        8 => Just(Say::Hold),
        4 => Just(Say::Inline),
        4 => Just(Say::Full),
        1 => Just(Say::InlineFailure),
        1 => Just(Say::Refuse),
    ]
}

proptest! {
    /// Any order of completions, any mixture of held, inline, full and failed: for each transfer the notification goes
    /// out at most once, behind all its data, and exactly if all of it was done.
    #[test]
    fn once_and_last_under_any_order(
        counts in prop::collection::vec(0..7_u64, 1..5),
        max_in_flight in 1..6_u32,
        script in prop::collection::vec(say(), 0..30),
        steps in prop::collection::vec(step(), 0..60),
    ) {
        let setup = Setup::one_by_one(max_in_flight);
        setup.fake.script(script);
        let mut transfers: Vec<_> = (0..)
            .zip(&counts)
            .map(|(i, count)| setup.write(&segments(*count), Some(&[i])))
            .collect();
        for step in steps.into_iter().chain(std::iter::repeat_n(Step::Done(0), 100)) {
            let held = setup.fake.held();
            match step {
                Step::Done(at) if !held.is_empty() => setup.fake.done(held[at % held.len()]),
                Step::Fail(at) if !held.is_empty() => setup.fake.fail(held[at % held.len()]),
                _ => {}
            }
            setup.port.poll();
        }
        let posts = setup.fake.posts();
        let ids: std::collections::BTreeSet<_> = posts.iter().map(|post| post.id).collect();
        prop_assert_eq!(ids.len(), posts.len(), "no number is used twice");
        for (i, (transfer, count)) in (0..).zip(transfers.iter_mut().zip(&counts)) {
            let result = transfer.try_result().unwrap();
            let note = [i];
            let sent = posts.iter().filter(|post| post.notify.as_deref() == Some(&note)).count();
            prop_assert!(sent <= 1);
            if let Ok(report) = result {
                prop_assert_eq!(sent, 1);
                prop_assert_eq!(report.batches, (*count).max(1));
            }
        }
        prop_assert_eq!(setup.port.stats().in_flight, 0);
        prop_assert_eq!(setup.port.stats().unsettled, 0);
        setup.port.deregister(setup.id).unwrap();
    }

    /// The order itself: at the moment when the notification is handed over, everything else has settled as done.
    #[test]
    fn the_rest_is_done_when_it_goes_out(
        count in 1..8_usize,
        max_in_flight in 1..9_u32,
        order in prop::collection::vec(any::<usize>(), 8),
        failing in prop::option::of(0..8_usize),
    ) {
        let setup = Setup::one_by_one(max_in_flight);
        let mut transfer = setup.write(&segments(count as u64), Some(b"n"));
        let (mut settled, mut failed) = (0, false);
        for at in order {
            let held = setup.fake.held();
            let Some(id) = held.get(at % held.len().max(1)).copied() else { break };
            let told = told(&setup.fake);
            if !told.is_empty() {
                prop_assert_eq!((settled, failed), (count - 1, false));
                prop_assert_eq!(&held, &told, "it is the last, and alone");
            }
            failed |= failing == Some(settled);
            let outcome =
                if failing == Some(settled) { Outcome::Cancelled } else { Outcome::done() };
            setup.fake.settle(id, outcome);
            settled += 1;
            setup.port.poll();
        }
        let result = transfer.try_result().unwrap();
        prop_assert_eq!(result.is_ok(), !failed);
        let last = settled == count;
        prop_assert_eq!(told(&setup.fake).len(), usize::from(!failed || last));
    }
}
