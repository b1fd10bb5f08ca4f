//! What reports of all ranks come to.

use std::collections::BTreeSet;

use super::*;

fn failed(attempt: u64, outcome: LoadOutcome, blocks: &[(u16, u32)]) -> LoadEnd {
    LoadEnd { blocks: blocks.to_vec(), ..LoadEnd::new(attempt, outcome, "why") }
}

fn set(blocks: &[(u16, u32)]) -> BTreeSet<(u16, u32)> {
    blocks.iter().copied().collect()
}

/// A consumer that loads 64 tokens into blocks 40 to 43, 16 of which it has, and the attempt.
fn loading(config: SchedulerConfig) -> (SchedulerConnector, Ask, u64) {
    let mut c = connector(config);
    let ask = Ask::from("d", 64, ticket_for(&[attention(16)], 64, &[&[1, 2, 3, 4]]));
    let attempt = c.load(&ask, 16, &[&[40, 41, 42, 43]]).1.loads[0].attempt;
    (c, ask, attempt)
}

/// Known failure 67 (vllm#50388): a bad block in group 1 of 2: this request fails, naming group and block; nothing else does.
#[test]
fn a_bad_block_fails_its_request_only() {
    let groups = [attention(16), attention(32)];
    let mut c = consumer(&groups);
    let a = Ask::from("a", 64, ticket_for(&groups, 64, &[&[1, 2, 3, 4], &[5, 6]]));
    let mut p = connector(config("prefill-1", &groups));
    let b = p.publish(&Ask::new("p", 16, for_decode()), &[&[7], &[8]]).0.params;
    let b = Ask::from("b", 16, b);
    let first = c.load(&a, 0, &[&[40, 41, 42, 43], &[44, 45]]).1.loads[0].attempt;
    let second = c.load(&b, 0, &[&[50], &[51]]).1.loads[0].attempt;
    c.loaded(0, first);
    // 51 is not a block of this load, and 44 is not one of group 0.
    let end = failed(first, LoadOutcome::Failed, &[(1, 45), (1, 51), (0, 44)]);
    let updates = c.load_end(1, end);
    let expected = LoadFailed {
        request: id("a"),
        blocks: set(&[(1, 45)]),
        computed: 32,
        then: OnFailure::Recompute,
        reason: "rank 1: why".into(),
    };
    assert_eq!(updates, Updates { failed: vec![expected], ..Updates::default() });
    assert_eq!(c.stats().stray_reports, 1);
    assert_eq!(c.step().releases[0].attempt, first);
    c.loaded(0, second);
    assert_eq!(c.loaded(1, second).received.len(), 1);
}

/// Known failures 43 (vllm#35943) and 48 (vllm#56104): the failure is told once all ranks have ended the load, not before, with
/// what is bad at any of them, and once.
#[test]
fn failed_blocks_are_those_of_all_ranks_and_told_once() {
    let mut config = config("decode-0", &[attention(16)]);
    config.on_failure = OnFailure::Fail;
    let (mut c, ask, attempt) = loading(config);
    let end = failed(attempt, LoadOutcome::Failed, &[(0, 43)]);
    assert!(c.load_end(1, end.clone()).is_empty());
    assert!(c.load_end(1, end.clone()).is_empty());
    let updates = c.load_end(0, failed(attempt, LoadOutcome::Failed, &[(0, 42)]));
    assert_eq!(updates.failed.len(), 1);
    assert_eq!(updates.failed[0].blocks, set(&[(0, 42), (0, 43)]));
    assert_eq!((updates.failed[0].computed, updates.failed[0].then), (32, OnFailure::Fail));
    assert!(c.load_end(0, end).is_empty());
    c.finish(&ask, FinishStatus::Failed, 16, &[&[40, 41, 42, 43]]);
    assert_eq!(c.step().releases.len(), 1, "once");
    c.assert_idle();
}

#[test]
fn a_failure_without_blocks_is_one_of_all_blocks() {
    let (mut c, _, attempt) = loading(config("decode-0", &[attention(16)]));
    c.loaded(0, attempt);
    let updates = c.load_end(1, failed(attempt, LoadOutcome::Failed, &[]));
    assert_eq!(updates.failed[0].blocks, set(&[(0, 41), (0, 42), (0, 43)]));
    assert_eq!(updates.failed[0].computed, 16);
}

/// What a state or a window needs of the tokens before it was never loaded: there is nothing to go on from but the prefix.
#[test]
fn after_a_failure_beside_a_state_or_a_window_only_the_prefix_is_good() {
    for (groups, blocks, own) in [
        ([attention(16), state()], [&[1, 2, 3][..], &[4]], [&[40, 41, 42][..], &[44]]),
        ([attention(16), attention(16)], [&[1, 2, 3], &[0, 5, 6]], [&[40, 41, 42], &[0, 45, 46]]),
    ] {
        let mut c = consumer(&groups);
        let ask = Ask::from("d", 41, ticket_for(&groups, 40, &blocks));
        let attempt = c.load(&ask, 0, &own).1.loads[0].attempt;
        c.loaded(0, attempt);
        let updates = c.load_end(1, failed(attempt, LoadOutcome::Failed, &[(0, 42)]));
        assert_eq!(updates.failed[0].computed, 0);
    }
}

/// Known failure 65 (local-inference-lab/vllm#191): a retry begins though there is no other traffic; it is another attempt, of
/// all ranks, and only when it fails as well is the engine told.
#[test]
fn a_load_is_tried_again_by_all_ranks_after_a_while() {
    let (mut c, _, first) = loading(config("decode-0", &[attention(16)]));
    c.loaded(0, first);
    assert!(c.load_end(1, failed(first, LoadOutcome::Retry, &[(0, 43)])).is_empty());
    let at = NOW + c.config().backoff;
    assert_eq!((c.next_wake(), c.has_pending(NOW), c.has_pending(at)), (Some(at), false, true));
    assert!(c.build_step(&[], NOW).unwrap().is_empty());
    let step = c.build_step(&[], at).unwrap();
    let load = &step.loads[0];
    assert!(load.attempt > first && step.releases.is_empty());
    assert_eq!((load.replaces, load.tokens.clone()), (Some(first), 16..64));
    // What is still said of the first attempt is nobody's.
    assert!(c.loaded(1, first).is_empty());
    let second = load.attempt;
    c.load_end(0, failed(second, LoadOutcome::Retry, &[(0, 41)]));
    assert_eq!(c.loaded(1, second).failed[0].blocks, set(&[(0, 41)]));
    assert_eq!((c.stats().loads, c.stats().retries, c.stats().failed), (2, 1, 1));
    assert_eq!(c.next_wake(), None);
}

#[test]
fn an_abort_between_two_tries_holds_nothing() {
    let (mut c, ask, first) = loading(config("decode-0", &[attention(16)]));
    (0..2).for_each(|rank| drop(c.load_end(rank, failed(first, LoadOutcome::Retry, &[]))));
    assert!(!c.finish(&ask, FinishStatus::Aborted, 16, &[&[40, 41, 42, 43]]).hold);
    let step = c.build_step(&[], NOW + Duration::from_secs(9)).unwrap();
    assert_eq!((step.loads.len(), step.releases.len()), (0, 1));
    c.assert_idle();
}

#[test]
fn where_somebody_may_still_write_nothing_is_tried_again_and_the_blocks_are_named() {
    let (mut c, _, attempt) = loading(config("decode-0", &[attention(16)]));
    let mut end = failed(attempt, LoadOutcome::Retry, &[(0, 42)]);
    end.quarantined = vec![(0, 42)];
    c.load_end(0, end);
    let updates = c.loaded(1, attempt);
    assert_eq!(updates.failed.len(), 1);
    let blocks = BTreeMap::from([(0, BTreeSet::from([42]))]);
    assert_eq!((&updates.quarantined, c.tables().quarantines), (&blocks, 1));
    let mut report = WorkerReport::new(c.incarnation(), 2);
    report.quiet.push(attempt);
    // The other rank never had a doubt.
    assert!(c.update(1, &report, NOW).unwrap().is_empty());
    assert_eq!(c.update(0, &report, NOW).unwrap().unquarantined, blocks);
    assert!(c.update(0, &report, NOW).unwrap().is_empty());
    assert_eq!(c.tables().quarantines, 0);
}

#[test]
fn reports_of_nobody_are_refused() {
    let (mut c, _, attempt) = loading(config("decode-0", &[attention(16)]));
    let mut report = WorkerReport::new(c.incarnation(), 1);
    report.loads.push(LoadEnd::new(attempt, LoadOutcome::Loaded, ""));
    assert!(c.update(2, &report, NOW).is_err());
    report.engine = Incarnation::from_bytes([9; 16]);
    assert!(c.update(0, &report, NOW).is_err());
    report.engine = c.incarnation();
    c.update(0, &report, NOW).unwrap();
    // Only now has the second rank not reported.
    assert_eq!(c.tables().loads, 1);
}

/// Known failure 118 (vllm#25388): counts are kept per rank, the newest of each; a request that two ranks load counts once in
/// the scheduler's.
#[test]
fn counts_are_of_ranks_or_of_requests() {
    let (mut c, _, attempt) = loading(config("decode-0", &[attention(16)]));
    for rank in 0..2 {
        for number in [1, 2, 1] {
            let mut report = WorkerReport::new(c.incarnation(), number);
            report.loads.push(LoadEnd::new(attempt, LoadOutcome::Loaded, ""));
            report.stats.bytes = 100 * number;
            c.update(rank, &report, NOW).unwrap();
        }
    }
    let bytes: Vec<_> = c.rank_stats().map(|(rank, stats)| (rank, stats.bytes)).collect();
    assert_eq!(bytes, [(0, 200), (1, 200)]);
    assert_eq!(c.stats().received, 1);
}

#[test]
fn cards_are_there_when_every_ranks_is() {
    let mut c = consumer(&[attention(16)]);
    assert!(!c.set_handshake_metadata(1, vec![1]).unwrap());
    assert!(!c.set_handshake_metadata(1, vec![2]).unwrap());
    assert!(c.set_handshake_metadata(2, vec![1]).is_err());
    assert!(c.set_handshake_metadata(0, vec![0; Card::MAX_BYTES + 1]).is_err());
    assert!(c.set_handshake_metadata(0, vec![1]).unwrap());
    assert_eq!(c.cards()[&1], [2]);
}

#[test]
fn a_config_that_cannot_be_is_refused() {
    let good = config("decode-0", &[attention(16)]);
    let refused = |change: fn(&mut SchedulerConfig)| {
        let mut config = good.clone();
        change(&mut config);
        SchedulerConnector::new(config).unwrap_err().kind() == kvx_core::ErrorKind::Config
    };
    SchedulerConnector::new(good.clone()).unwrap();
    assert!(refused(|config| config.groups.clear()));
    assert!(refused(|config| config.groups[0].local_only = true));
    assert!(refused(|config| config.groups[0].group.block_tokens = 0));
    assert!(refused(|config| config.groups = vec![config.groups[0]; 65]));
    assert!(refused(|config| config.replica = 1));
    assert!(refused(|config| config.grid.tp = 0));
    assert!(refused(|config| config.lease = Duration::from_millis(99)));
    assert!(refused(|config| config.max_requests = 0));
}

/// Known failure 66 (vllm#45357, #47373): a kernel that zeroes new blocks, queued before a load was known of, erased what the load had
/// written. The engine is told which blocks are being written, from when it gave them until nothing moves there.
#[test]
fn blocks_that_are_being_written_are_known() {
    let groups = [attention(16)];
    let (mut p, mut c) = (producer(&groups), consumer(&groups));
    let mut ticket =
        |name, prompt, ids| p.publish(&Ask::new(name, prompt, for_decode()), ids).0.params;
    let written = |c: &SchedulerConnector| {
        c.being_written().remove(&0).unwrap_or_default().into_iter().collect::<Vec<_>>()
    };
    // The first block is the consumer's own: nothing is loaded there.
    let ask = Ask::from("d", 48, ticket("a", 48, &[&[7, 3, 12]]));
    assert_eq!(c.matched_tokens(&ask.request(), 16).unwrap().tokens(), Some(32));
    assert!(written(&c).is_empty());
    c.after_alloc(&ask.id, &tables(&[&[9, 41, 40]]), 32).unwrap();
    assert_eq!(written(&c), [40, 41], "before the workers know of it");
    let attempt = c.step().loads[0].attempt;
    assert_eq!(written(&c), [40, 41]);
    c.loaded(0, attempt);
    assert_eq!(written(&c), [40, 41], "another rank still writes");
    c.loaded(1, attempt);
    assert!(written(&c).is_empty());
    c.finish(&ask, FinishStatus::Stopped, 60, &[&[9, 41, 40, 42]]);
    // Aborted: until it is quiet.
    let ask = Ask::from("e", 32, ticket("b", 32, &[&[5, 6]]));
    let attempt = c.load(&ask, 0, &[&[20, 21]]).1.loads[0].attempt;
    c.finish(&ask, FinishStatus::Aborted, 0, &[&[20, 21]]);
    c.step();
    c.load_end(0, LoadEnd::new(attempt, LoadOutcome::Aborted, ""));
    assert_eq!(written(&c), [20, 21]);
    let mut end = LoadEnd::new(attempt, LoadOutcome::Aborted, "");
    end.quarantined = vec![(0, 21)];
    c.load_end(1, end);
    assert_eq!(written(&c), [21], "in quarantine");
    let mut report = WorkerReport::new(c.incarnation(), 9);
    report.quiet.push(attempt);
    c.update(1, &report, NOW).unwrap();
    assert!(written(&c).is_empty());
    c.assert_idle();
}
