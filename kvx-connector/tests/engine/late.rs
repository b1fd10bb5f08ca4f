//! What whoever comes too late, or with a ticket for something else, is told by an engine.

use std::time::Duration;

use kvx_connector::control::Key;
use kvx_connector::engine::EngineSetup;
use kvx_connector::protocol::{Access, Reason};
use kvx_connector::ticket::{Parts, Ticket};
use kvx_connector::worker::{Aborter, FetchFailure, Fetching};
use kvx_core::ErrorKind;
use kvx_core::layout::NamedLayout::FlashAttentionHnd as Hnd;
use kvx_core::memory::Region;

use crate::pair::{Over, Shape, Side, model, side};
use crate::{TOKENS, Two, key};

/// A ticket whose lease has ended so.
async fn ended_by(two: &Two, why: Reason) -> Ticket {
    if why == Reason::Released {
        return released(two).await;
    }
    let published = two.publish(&format!("{why:?}"));
    let ticket = published.ticket().clone();
    match why {
        Reason::Done => drop(two.fetch(&ticket).over().await.unwrap()),
        Reason::Expired => {}
        why => published.withdraw(why),
    }
    assert_eq!(published.over().await.unwrap(), [why]);
    ticket
}

/// One of a fetch that was given up. A fetch may be over before that: then it is done, and there is another.
async fn released(two: &Two) -> Ticket {
    for attempt in 0..20 {
        let published = two.publish(&format!("given up {attempt}"));
        let ticket = published.ticket().clone();
        let ranks = two.fetch(&ticket).into_ranks();
        let aborters: Vec<_> = ranks.iter().map(Fetching::aborter).collect();
        // One by one, and by whoever does not hold them.
        let ended: Vec<_> = ranks.into_iter().map(tokio::spawn).collect();
        aborters.iter().for_each(Aborter::abort);
        let mut given_up = true;
        for rank in ended {
            match rank.await.unwrap() {
                Ok(_) => given_up = false,
                Err(failure) => assert_eq!(failure.error.kind(), ErrorKind::Closed),
            }
        }
        let why = published.over().await.unwrap();
        if given_up {
            assert_eq!(why, [Reason::Released]);
            return ticket;
        }
    }
    panic!("twenty fetches were over before they were given up");
}

/// All that is in an engine's memory.
fn bytes(side: &Side) -> Vec<Vec<u8>> {
    let read = |region: &Region| {
        let mut bytes = vec![0; usize::try_from(region.bytes()).unwrap()];
        region.read_at(0, &mut bytes).unwrap();
        bytes
    };
    side.regions.iter().flatten().map(read).collect()
}

fn assert_told(failure: &FetchFailure, why: Reason, text: &str) {
    assert_eq!(failure.reason, Some(why), "{failure}");
    assert!(failure.to_string().contains(text), "{failure}");
    assert!(failure.error.remedy().is_some(), "{failure}");
    assert_eq!((failure.blocks.len(), failure.quarantined), (4, false), "{failure}");
}

#[tokio::test]
async fn whoever_comes_late_is_told_why() {
    for digests in [false, true] {
        late_users_are_told_why(digests).await;
    }
}

/// Where digests are compared, the owner that gives none any more says why not.
async fn late_users_are_told_why(digests: bool) {
    let with = |setup: &mut EngineSetup| setup.digests = digests;
    let two = Two::new(|_| {}, with).await;
    // The first is given up before the two know each other: released once they do.
    for (why, text) in [
        (Reason::Released, "whoever used it before gave it up"),
        (Reason::Done, "another attempt has read all of it"),
        (Reason::Aborted, "its engine aborted the request"),
        (Reason::Preempted, "its engine preempted the request"),
        (Reason::Failed, "its engine failed the request"),
    ] {
        let ticket = ended_by(&two, why).await;
        assert_told(&two.fetch(&ticket).over().await.unwrap_err(), why, text);
    }
    let brief = |setup: &mut EngineSetup| setup.ttl = Duration::from_millis(50);
    let two = Two::new(brief, with).await;
    let ticket = ended_by(&two, Reason::Expired).await;
    let failure = two.fetch(&ticket).over().await.unwrap_err();
    assert_told(&failure, Reason::Expired, "nobody held it in time");
    let mut ticket = ticket;
    ticket.lease.owner = kvx_core::id::Incarnation::random().unwrap();
    let failure = two.fetch(&ticket).over().await.unwrap_err();
    assert!(failure.to_string().contains("life"), "{failure}");
}

/// Whoever holds a ticket may say what it likes of it: the owner looks, too, and the next is served.
#[tokio::test]
async fn a_ticket_that_was_changed_is_refused_by_the_owner() {
    let two = Two::new(|_| {}, |_| {}).await;
    let published = two.publish("r");
    let mut ticket = published.ticket().clone();
    ticket.access = Access::Write;
    let before = two.producer.wrong(&two.theirs, 0..TOKENS);
    let store = two.consumer.engine.store(&ticket, 0..TOKENS, &two.ours).unwrap();
    let failure = store.over().await.unwrap_err();
    assert_told(&failure, Reason::Access, "not to be written, and this side writes");
    assert_eq!(two.producer.wrong(&two.theirs, 0..TOKENS), before);
    two.fetch(published.ticket()).over().await.unwrap();
    assert_eq!(published.over().await.unwrap(), [Reason::Done]);
    assert_eq!(two.consumer.wrong(&two.ours, 0..TOKENS), 0);

    let invited = two.consumer.engine.invite(key("w"), TOKENS, &two.ours).unwrap();
    let mut ticket = invited.ticket().clone();
    ticket.access = Access::Read;
    let fetch = two.producer.engine.fetch(&ticket, 0..TOKENS, &two.theirs).unwrap();
    let failure = fetch.over().await.unwrap_err();
    assert_told(&failure, Reason::Access, "not to be read, and this side reads");
    let store = two.producer.engine.store(invited.ticket(), 0..TOKENS, &two.theirs).unwrap();
    store.over().await.unwrap();
    assert_eq!(invited.over().await.unwrap(), [Reason::Done]);
}

/// A ticket in which somebody put other blocks, tokens or parts, with a checksum that fits.
#[tokio::test]
async fn a_ticket_of_other_blocks_is_refused_by_the_owner() {
    let two = Two::new(|_| {}, |_| {}).await;
    let published = two.publish("r");
    let edits: [fn(&mut Ticket); 4] = [
        |it| it.groups[0].table.ids.swap(0, 1),
        |it| it.groups[0].table.ids[2] += 5,
        |it| it.tokens -= 1,
        |it| it.parts = Parts::Announced,
    ];
    let text = "not as its engine gave it";
    for edit in edits {
        let mut ticket = published.ticket().clone();
        edit(&mut ticket);
        let ticket = Ticket::from_bytes(&ticket.to_bytes().unwrap()).unwrap();
        let fetch = two.consumer.engine.fetch(&ticket, 0..TOKENS - 1, &two.ours).unwrap();
        assert_told(&fetch.over().await.unwrap_err(), Reason::Ticket, text);
    }
    // Its lease is not used up by that.
    two.fetch(published.ticket()).over().await.unwrap();
    assert_eq!(two.consumer.wrong(&two.ours, 0..TOKENS), 0);
    assert_eq!(published.over().await.unwrap(), [Reason::Done]);

    // A writer is not let in: nothing is written, neither into the blocks that are leased nor into others.
    let all = two.consumer.tables(2 * TOKENS, 1);
    let invited = two.consumer.engine.invite(key("w"), TOKENS, &two.ours).unwrap();
    let mut ticket = invited.ticket().clone();
    ticket.groups[0].table.ids[0] = *all[0].ids.last().unwrap();
    let before = bytes(&two.consumer);
    let store = two.producer.engine.store(&ticket, 0..TOKENS, &two.theirs).unwrap();
    assert_told(&store.over().await.unwrap_err(), Reason::Ticket, text);
    assert!(bytes(&two.consumer) == before, "something was written");
    let store = two.producer.engine.store(invited.ticket(), 0..TOKENS, &two.theirs).unwrap();
    store.over().await.unwrap();
    assert_eq!(invited.over().await.unwrap(), [Reason::Done]);
}

/// Known failure 47 (vllm#52234): a ticket of blocks that its owner does not have: nothing is read, all blocks are bad, and neither the lease
/// nor the engines are the worse for it.
#[tokio::test]
async fn a_ticket_of_blocks_that_there_are_not_is_never_ready() {
    let two = Two::new(|_| {}, |_| {}).await;
    let published = two.publish("r");
    let before = bytes(&two.consumer);
    for id in [10_000, u32::MAX] {
        let mut ticket = published.ticket().clone();
        ticket.groups[0].table.ids[1] = id;
        let ticket = Ticket::from_bytes(&ticket.to_bytes().unwrap()).unwrap();
        let failure = two.fetch(&ticket).over().await.unwrap_err();
        assert!(failure.to_string().contains("out of range"), "{failure}");
        assert_eq!((failure.blocks.len(), failure.quarantined), (4, false), "{failure}");
    }
    assert!(bytes(&two.consumer) == before, "something was read");
    two.fetch(published.ticket()).over().await.unwrap();
    assert_eq!(published.over().await.unwrap(), [Reason::Done]);
    assert_eq!(two.consumer.wrong(&two.ours, 0..TOKENS), 0);
}

/// Two engines of one name: whoever has met both is told at once when it asks the one in whose place the other is, and the other goes
/// on; once that has ended, the one that was refused serves.
#[tokio::test]
async fn two_engines_of_one_name_are_told_so() {
    let (secret, model, shm) = (Key::generate().unwrap(), model(), Over::new("shm"));
    let shape = Shape::new(Hnd, 1, 1, 16);
    let start = |name| side(name, &model, shape, TOKENS, (&secret, &shm), |_| {});
    let (first, second) = (start("prefill").await, start("prefill").await);
    let consumer = start("decode").await;
    let ours = consumer.tables(TOKENS, 1);
    let ask = async |side: &Side, name: &str| {
        let theirs = side.tables(TOKENS, 0);
        let published = side.engine.publish(key(name), TOKENS, &theirs).unwrap();
        let fetch = consumer.engine.fetch(published.ticket(), 0..TOKENS, &ours).unwrap();
        let ended = fetch.over().await;
        published.withdraw(Reason::Aborted);
        ended
    };
    ask(&first, "a").await.unwrap();
    ask(&second, "b").await.unwrap();
    let begun = std::time::Instant::now();
    let failure = ask(&first, "c").await.unwrap_err();
    assert!(begun.elapsed() < Duration::from_secs(5), "{failure}");
    for said in ["two engines have one name", "in_its_place=prefill", "a name of its own"] {
        assert!(failure.to_string().contains(said), "{failure}");
    }
    ask(&second, "d").await.unwrap();
    drop(second);
    let begun = std::time::Instant::now();
    while let Err(failure) = ask(&first, "e").await {
        assert!(begun.elapsed() < Duration::from_secs(30), "{failure}");
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

/// A lease that is kept in a task of its own, by an engine that others have, too.
#[tokio::test]
async fn a_lease_can_be_kept_apart_from_its_engine() {
    let Two { producer, consumer, theirs, ours } = Two::new(|_| {}, |_| {}).await;
    let engine = std::sync::Arc::new(producer.engine);
    let leased = engine.publish(key("r-1"), TOKENS, &theirs).unwrap().into_owned();
    let ticket = leased.ticket().clone();
    let kept = tokio::spawn(leased.over());
    consumer.engine.fetch(&ticket, 0..TOKENS, &ours).unwrap().over().await.unwrap();
    assert_eq!(kept.await.unwrap().unwrap(), [Reason::Done]);
    let leased = engine.publish(key("r-2"), TOKENS, &theirs).unwrap().into_owned();
    let taken = tokio::spawn(async move {
        leased.withdraw(Reason::Preempted);
        leased.over().await
    });
    assert_eq!(taken.await.unwrap().unwrap(), [Reason::Preempted]);
    let leased = engine.publish(key("r-3"), TOKENS, &theirs).unwrap().into_owned();
    drop(engine);
    leased.withdraw(Reason::Aborted);
    let error = leased.over().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
}
