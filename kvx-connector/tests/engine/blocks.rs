//! Blocks that an engine is given for a lease or a fetch: what is wrong with them is said before anybody else hears of it, and nobody
//! writes where somebody else reads or writes.

use kvx_connector::engine::Fetch;
use kvx_connector::protocol::Reason;
use kvx_connector::ticket::{Table, Ticket};
use kvx_core::{Error, ErrorKind};

use crate::{TOKENS, Two, key};

fn assert_says(error: &Error, what: &str) {
    assert_eq!(error.kind(), ErrorKind::Misuse, "{error}");
    assert!(error.to_string().contains(what), "{error} does not say {what:?}");
}

/// Tables that are like these, but for one thing, and what is said of them.
fn wrong(tables: &[Table]) -> [(Vec<Table>, &'static str); 4] {
    let changed = |change: fn(&mut Vec<u32>)| {
        let mut tables = tables.to_vec();
        change(&mut tables[0].ids);
        tables
    };
    [
        (changed(|ids| ids[1] = 10_000), "outside of the pool (group=0, id=10000"),
        (changed(|ids| ids[1] = ids[3]), "in the table twice (group=0"),
        (changed(|ids| ids.truncate(3)), "ends before the tokens do"),
        (Vec::new(), "one block table per cache group"),
    ]
}

fn open(two: &Two) -> Vec<(usize, usize)> {
    let both = [&two.producer, &two.consumer];
    both.iter().flat_map(|side| side.engine.workers()).map(|worker| worker.open()).collect()
}

#[tokio::test]
async fn bad_tables_are_refused_before_there_is_a_lease() {
    let two = Two::new(|_| {}, |_| {}).await;
    for (tables, what) in wrong(&two.theirs) {
        assert_says(&two.producer.engine.publish(key("r"), TOKENS, &tables).unwrap_err(), what);
        assert_says(&two.producer.engine.invite(key("r"), TOKENS, &tables).unwrap_err(), what);
    }
    assert_eq!(open(&two), [(0, 0), (0, 0)]);
    let published = two.publish("r");
    assert_eq!(published.ticket().lease.number, 1, "nothing was leased before");
    two.fetch(published.ticket()).over().await.unwrap();
    assert_eq!(published.over().await.unwrap(), [Reason::Done]);
}

/// A fetch or a store whose own blocks are wrong is not begun: the ticket is as good as before.
#[tokio::test]
async fn bad_tables_of_ones_own_use_up_no_ticket() {
    let two = Two::new(|_| {}, |_| {}).await;
    let published = two.publish("r");
    let ticket = published.ticket();
    for (tables, what) in wrong(&two.ours) {
        let error = two.consumer.engine.fetch(ticket, 0..TOKENS, &tables).unwrap_err();
        assert_says(&error, what);
    }
    two.fetch(ticket).over().await.unwrap();
    assert_eq!(published.over().await.unwrap(), [Reason::Done]);
    assert_eq!(two.consumer.wrong(&two.ours, 0..TOKENS), 0);
    let invited = two.consumer.engine.invite(key("w"), TOKENS, &two.ours).unwrap();
    let store = |tables: &[Table]| two.producer.engine.store(invited.ticket(), 0..TOKENS, tables);
    for (tables, what) in wrong(&two.theirs) {
        assert_says(&store(&tables).unwrap_err(), what);
    }
    store(&two.theirs).unwrap().over().await.unwrap();
    assert_eq!(invited.over().await.unwrap(), [Reason::Done]);
}

/// A fetch that waits for an engine that nobody reaches, until it is given up.
fn waiting(two: &Two, ticket: &Ticket) -> Fetch {
    let cards = "127.0.0.1:1".parse().unwrap();
    two.fetch(&Ticket { cards, ..ticket.clone() })
}

#[tokio::test]
async fn nobody_writes_where_another_writes() {
    let two = Two::new(|_| {}, |_| {}).await;
    let published = two.publish("r");
    let ticket = published.ticket();
    let written = "being written by another fetch";
    let first = waiting(&two, ticket);
    let again = || two.consumer.engine.fetch(ticket, 0..TOKENS, &two.ours);
    assert_says(&again().unwrap_err(), written);
    // Only blocks that hold what is fetched are in use by it: a prefix may be shared.
    let mut shared = two.ours.clone();
    shared[0].ids[3] = 2;
    let elsewhere = Ticket { cards: "127.0.0.1:1".parse().unwrap(), ..ticket.clone() };
    let tail = two.consumer.engine.fetch(&elsewhere, 48..TOKENS, &shared).unwrap();
    assert_says(&two.consumer.engine.fetch(ticket, 47..TOKENS, &shared).unwrap_err(), written);
    tail.abort();
    tail.over().await.unwrap_err();
    for leased in [
        two.consumer.engine.publish(key("a"), TOKENS, &two.ours),
        two.consumer.engine.invite(key("b"), TOKENS, &two.ours),
    ] {
        assert_says(&leased.unwrap_err(), written);
    }
    first.abort();
    assert_eq!(first.over().await.unwrap_err().error.kind(), ErrorKind::Closed);
    again().unwrap().over().await.unwrap();
    assert_eq!(published.over().await.unwrap(), [Reason::Done]);
    assert_eq!(two.consumer.wrong(&two.ours, 0..TOKENS), 0);
}

/// What is leased may be leased once more, to read or to write, and stored from; nobody fetches to there before all of that has ended.
#[tokio::test]
async fn nobody_fetches_to_what_is_leased_or_stored_from() {
    let two = Two::new(|_| {}, |_| {}).await;
    let published = two.publish("r");
    let leased = "leased, or stored from";
    let fetch = || two.consumer.engine.fetch(published.ticket(), 0..TOKENS, &two.ours);
    let invite = |name: &str| two.consumer.engine.invite(key(name), TOKENS, &two.ours).unwrap();
    let (first, second) = (invite("w-1"), invite("w-2"));
    assert_says(&fetch().unwrap_err(), leased);
    second.withdraw(Reason::Aborted);
    assert_eq!(second.over().await.unwrap(), [Reason::Aborted]);
    assert_says(&fetch().unwrap_err(), leased);
    // What is leased to be read is stored from, too.
    let store = two.producer.engine.store(first.ticket(), 0..TOKENS, &two.theirs).unwrap();
    store.over().await.unwrap();
    assert_eq!(first.over().await.unwrap(), [Reason::Done]);
    let read = two.consumer.engine.publish(key("again"), TOKENS, &two.ours).unwrap();
    assert_says(&fetch().unwrap_err(), leased);
    read.withdraw(Reason::Aborted);
    assert_eq!(read.over().await.unwrap(), [Reason::Aborted]);
    fetch().unwrap().over().await.unwrap();
    assert_eq!(published.over().await.unwrap(), [Reason::Done]);
    assert_eq!(two.consumer.wrong(&two.ours, 0..TOKENS), 0);
}
