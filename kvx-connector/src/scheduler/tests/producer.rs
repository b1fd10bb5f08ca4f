//! The producer's part.

use kvx_core::plan::kernel_blocks;

use super::*;
use crate::ticket::TransferParams;

fn ticket(finished: &Finished) -> Ticket {
    let params = Value::Object(finished.params.clone().unwrap());
    TransferParams::from_json(&params).unwrap().ticket.unwrap()
}

#[test]
fn a_request_is_held_until_every_rank_has_ended_its_lease() {
    let mut p = producer(&[attention(16)]);
    let ask = Ask::new("r", 40, for_decode());
    let (finished, step) = p.publish(&ask, &[&[7, 3, 12]]);
    assert!(finished.hold);
    let ticket = ticket(&finished);
    assert_eq!((ticket.tokens, ticket.groups[0].table.ids.as_slice()), (40, &[7, 3, 12][..]));
    assert_eq!(step.grants.len(), 1);
    assert_eq!((step.grants[0].lease, &step.grants[0].key), (ticket.lease, &ticket.key));
    assert_eq!(step.expects[0].lease, ticket.lease);
    assert_eq!(p.lease_ended(1, ticket.lease, Reason::Done), Updates::default());
    let updates = p.lease_ended(0, ticket.lease, Reason::Done);
    assert_eq!(updates.sent, [id("r")]);
    p.assert_idle();
    assert_eq!((p.stats().granted, p.stats().sent), (1, 1));
}

/// Known failure 8 (vllm#28661): the scheduler's ids are those of logical blocks. They go out as they are, with the logical
/// block's size; whoever moves bytes makes kernel blocks of them.
#[test]
fn tables_are_of_logical_blocks() {
    let group = CacheGroup { kernel_block_tokens: 64, ..attention(128) };
    let (finished, step) =
        producer(&[group]).publish(&Ask::new("r", 256, for_decode()), &[&[3, 7]]);
    let ticket = ticket(&finished);
    assert_eq!(ticket.groups[0].block_tokens, 128);
    assert_eq!(step.grants[0].tables[0].ids, [3, 7]);
    let kernel: Vec<_> = kernel_blocks(&ticket.groups[0].table.ids, group.kernel_ratio()).collect();
    assert_eq!(kernel, [6, 7, 14, 15]);
}

/// Known failures 12 (vllm#50714) and 24 (vllm#42024): groups of 4 and of 256 tokens stay two groups, each with its own
/// blocks.
#[test]
fn each_group_keeps_its_geometry() {
    let mut p = producer(&[attention(4), attention(256)]);
    let (finished, step) = p.publish(&Ask::new("r", 10, for_decode()), &[&[5, 6, 7], &[9]]);
    let ticket = ticket(&finished);
    let groups: Vec<_> =
        ticket.groups.iter().map(|it| (it.block_tokens, it.table.ids.clone())).collect();
    assert_eq!(groups, [(4, vec![5, 6, 7]), (256, vec![9])]);
    assert_eq!(step.grants[0].tables.len(), 2);
}

/// Known failure 23 (vllm#42554): placeholders before a state or a window are no blocks.
#[test]
fn placeholders_are_left_out() {
    let mut p = producer(&[state(), attention(16)]);
    let (finished, _) = p.publish(&Ask::new("r", 40, for_decode()), &[&[0, 0, 14], &[0, 8, 9]]);
    let ticket = ticket(&finished);
    let tables: Vec<_> =
        ticket.groups.iter().map(|it| (it.table.first, it.table.ids.clone())).collect();
    assert_eq!(tables, [(2, vec![14]), (1, vec![8, 9])]);
}

/// Known failure 28 (vllm#18590): a request without blocks is free at once, and nobody is waited for.
#[test]
fn nothing_is_held_for_a_request_without_blocks() {
    let mut p = producer(&[attention(16)]);
    for (ids, tokens) in [(&[][..], 0), (&[0][..], 5)] {
        let ask = Ask::new("r", tokens, for_decode());
        let (finished, step) = p.publish(&ask, &[ids]);
        assert!(!finished.hold);
        assert!(ticket(&finished).is_empty());
        assert!(step.grants.is_empty());
        p.assert_idle();
    }
}

/// Known failure 31 (vllm#21074): a prompt of two and a half blocks has three. One shorter than a block has one. What was
/// allocated beyond the tokens has none.
#[test]
fn a_partial_block_counts() {
    for (tokens, blocks) in [(40, 3), (1, 1), (16, 1), (17, 2)] {
        let mut p = producer(&[attention(16)]);
        let (finished, _) = p.publish(&Ask::new("r", tokens, for_decode()), &[&[1, 2, 3, 4]]);
        assert_eq!(ticket(&finished).blocks(), blocks, "{tokens} tokens");
    }
}

/// Known failure 32 (vllm#30358): three chunks of two blocks are six blocks to be copied into the host's buffer. A block that a
/// chunk ends in is copied again with the next. Known failure 62 (sglang#6320): nothing is granted before the last chunk.
#[test]
fn every_chunk_is_copied_into_the_hosts_buffer() {
    let mut config = config("prefill-0", &[attention(16)]);
    config.host_buffer = true;
    let mut p = connector(config);
    let ask = Ask::new("r", 96, for_decode());
    p.on_new_request(&ask.request()).unwrap();
    p.after_alloc(&ask.id, &tables(&[&[1, 2]]), 0).unwrap();
    let more: [&[&[u32]]; 3] = [&[], &[&[3, 4]], &[&[5, 6]]];
    let mut saved = Vec::new();
    for (chunk, appended) in (0..).zip(more) {
        let at = Scheduled { request: &ask.id, computed: 32 * chunk, tokens: 32, appended };
        let step = p.build_step(&[at], NOW).unwrap();
        assert!(step.grants.is_empty());
        assert_eq!(step.saves.len(), 1);
        assert_eq!(u64::from(step.saves[0].part), chunk);
        saved.extend(step.saves[0].tables[0].ids.clone());
    }
    assert_eq!(saved, [1, 2, 3, 4, 5, 6]);
    let finished = p.finish(&ask, FinishStatus::LengthCapped, 96, &[&[1, 2, 3, 4, 5, 6]]);
    assert!(finished.hold);
    let step = p.step();
    assert!(step.saves.is_empty());
    assert_eq!((step.grants[0].parts, step.grants[0].tokens), (3, 96));
}

#[test]
fn a_block_in_which_a_chunk_ends_is_copied_again() {
    let mut config = config("prefill-0", &[attention(16)]);
    config.host_buffer = true;
    let mut p = connector(config);
    let ask = Ask::new("r", 40, for_decode());
    p.on_new_request(&ask.request()).unwrap();
    p.after_alloc(&ask.id, &tables(&[&[1, 2, 3]]), 0).unwrap();
    let mut at = Scheduled { request: &ask.id, computed: 0, tokens: 24, appended: &[] };
    assert_eq!(p.build_step(&[at], NOW).unwrap().saves[0].tables[0].ids, [1, 2]);
    (at.computed, at.tokens) = (24, 16);
    let save = p.build_step(&[at], NOW).unwrap().saves.remove(0);
    assert_eq!((save.tables[0].first, save.tables[0].ids.clone()), (1, vec![2, 3]));
    assert_eq!(save.tokens, 24..40);
}

/// Known failure 36 (vllm#43509): siblings have a lease each. One is read, the others expire; all are freed.
#[test]
fn siblings_have_a_lease_each() {
    let mut p = producer(&[attention(16)]);
    let mut params = for_decode();
    params["transfer_id"] = "from-the-router".into();
    let tickets: Vec<_> = (0..3)
        .map(|sibling| {
            let ask = Ask::new(&format!("r_{sibling}"), 16, params.clone());
            ticket(&p.publish(&ask, &[&[sibling + 1]]).0)
        })
        .collect();
    assert_eq!(tickets[0].key.as_str(), "from-the-router");
    assert!(tickets[0].key != tickets[1].key && tickets[1].key != tickets[2].key);
    let mut sent = Vec::new();
    for (ticket, why) in tickets.iter().zip([Reason::Done, Reason::Expired, Reason::Expired]) {
        for rank in 0..2 {
            sent.extend(p.lease_ended(rank, ticket.lease, why).sent);
        }
    }
    assert_eq!(sent, [id("r_0"), id("r_1"), id("r_2")]);
    p.assert_idle();
    assert_eq!((p.stats().sent, p.stats().expired), (1, 2));
}

/// Known failure 37 (vllm#25067): finished, then aborted, then read: freed once, and no error.
#[test]
fn an_abort_after_the_end_takes_the_lease_back() {
    let mut p = producer(&[attention(16)]);
    let ask = Ask::new("r", 16, for_decode());
    let lease = ticket(&p.publish(&ask, &[&[1]]).0).lease;
    for _ in 0..2 {
        let again = p.finish(&ask, FinishStatus::Aborted, 16, &[&[1]]);
        assert_eq!(again, Finished { hold: true, params: None });
    }
    assert_eq!(p.step().withdrawals, [Withdrawal { lease, why: Reason::Aborted }]);
    assert!(p.lease_ended(0, lease, Reason::Done).is_empty());
    assert_eq!(p.lease_ended(1, lease, Reason::Aborted).sent, [id("r")]);
    assert!(p.lease_ended(1, lease, Reason::Done).is_empty());
    p.assert_idle();
    assert_eq!((p.stats().withdrawn, p.stats().stray_reports), (1, 1));
}

/// Known failure 38 (vllm#29906): ten requests that are aborted as they finish keep the pool for one step, not for a lease.
#[test]
fn requests_aborted_as_they_finish_are_free_with_the_next_step() {
    let mut p = producer(&[attention(16)]);
    let asks: Vec<_> = (0..10).map(|i| Ask::new(&format!("r{i}"), 16, for_decode())).collect();
    for ask in &asks {
        p.on_new_request(&ask.request()).unwrap();
        p.after_alloc(&ask.id, &tables(&[&[1]]), 0).unwrap();
        assert!(p.finish(ask, FinishStatus::LengthCapped, 16, &[&[1]]).hold);
        assert!(p.finish(ask, FinishStatus::Aborted, 16, &[&[1]]).hold);
    }
    let step = p.step();
    // Granted and taken back in one step, in this order.
    assert_eq!((step.grants.len(), step.withdrawals.len()), (10, 10));
    let sent: usize = (0..2)
        .flat_map(|rank| step.withdrawals.iter().map(move |it| (rank, it.lease)))
        .map(|(rank, lease)| p.lease_ended(rank, lease, Reason::Aborted).sent.len())
        .sum();
    assert_eq!(sent, 10);
    p.assert_idle();
}

/// Known failure 42 (vllm#50425): a prefill that no decoder ever asks for ends by its lease, and is counted.
#[test]
fn a_lease_that_nobody_uses_expires_and_is_counted() {
    let mut p = producer(&[attention(16)]);
    let lease = ticket(&p.publish(&Ask::new("r", 16, for_decode()), &[&[1]]).0).lease;
    assert!(p.lease_ended(0, lease, Reason::Expired).is_empty());
    assert_eq!(p.lease_ended(1, lease, Reason::Released).sent, [id("r")]);
    assert_eq!((p.stats().expired, p.stats().sent), (1, 0));
}

/// Known failure 95 (vllm#24268): read and expired in the same moment: freed once.
#[test]
fn two_ends_in_one_report_are_one_end() {
    let mut p = producer(&[attention(16)]);
    let lease = ticket(&p.publish(&Ask::new("r", 16, for_decode()), &[&[1]]).0).lease;
    let mut report = WorkerReport::new(p.incarnation(), 1);
    report.ended = [Reason::Done, Reason::Expired].map(|why| LeaseEnd { lease, why }).to_vec();
    // One rank twice is not two ranks.
    assert!(p.update(0, &report, NOW).unwrap().is_empty());
    assert!(p.update(0, &report, NOW).unwrap().is_empty());
    assert_eq!(p.update(1, &report, NOW).unwrap().sent, [id("r")]);
    p.assert_idle();
}

/// Known failures 7 and 81 (vllm#32630): the transfer's name is neither side's own.
#[test]
fn the_transfers_name_is_not_the_requests() {
    let mut p = producer(&[attention(16)]);
    let mut params = for_decode();
    params["transfer_id"] = "x-1a".into();
    let (finished, step) = p.publish(&Ask::new("x-1a", 16, params), &[&[1]]);
    let ticket = ticket(&finished);
    assert_ne!(ticket.key.as_str(), "x-1a");
    assert_eq!(step.grants[0].request.as_str(), "x-1a");
    let mut c = consumer(&[attention(16)]);
    let (_, step) = c.load(&Ask::from("x-2b", 16, finished.params), 0, &[&[5]]);
    assert_eq!((&step.loads[0].source.key, step.loads[0].request.as_str()), (&ticket.key, "x-2b"));
}

/// Known failure 119 (vllm#54926): a group that is this side's alone is left out, and can be seen to be.
#[test]
fn a_group_of_this_side_alone_is_listed() {
    let mut config = config("prefill-0", &[attention(16), attention(16)]);
    config.groups[1].local_only = true;
    let mut p = connector(config);
    assert_eq!(p.local_only_groups().collect::<Vec<_>>(), [1]);
    let (finished, step) = p.publish(&Ask::new("r", 16, for_decode()), &[&[1], &[2]]);
    assert!(ticket(&finished).groups[1].table.ids.is_empty());
    assert!(step.grants[0].tables[1].ids.is_empty());
}

#[test]
fn only_what_ended_by_its_length_is_published() {
    for status in [FinishStatus::Stopped, FinishStatus::Aborted, FinishStatus::Failed] {
        let mut p = producer(&[attention(16)]);
        let ask = Ask::new("r", 16, for_decode());
        p.on_new_request(&ask.request()).unwrap();
        p.after_alloc(&ask.id, &tables(&[&[1]]), 0).unwrap();
        let lease = p.step().expects[0].lease;
        assert_eq!(p.finish(&ask, status, 16, &[&[1]]), Finished::default());
        let withdrawals = p.step().withdrawals;
        assert_eq!(withdrawals.iter().map(|it| it.lease).collect::<Vec<_>>(), [lease]);
        assert_eq!(withdrawals[0].why == Reason::Failed, status == FinishStatus::Failed);
        p.assert_idle();
    }
}

#[test]
fn a_preempted_request_goes_on_in_the_next_epoch() {
    let mut config = config("prefill-0", &[attention(16)]);
    config.host_buffer = true;
    let mut p = connector(config);
    let ask = Ask::new("r", 32, for_decode());
    p.on_new_request(&ask.request()).unwrap();
    p.after_alloc(&ask.id, &tables(&[&[1]]), 0).unwrap();
    let mut at = Scheduled { request: &ask.id, computed: 0, tokens: 16, appended: &[] };
    let first = p.build_step(&[at], NOW).unwrap();
    assert!(!p.preempted(&ask.id));
    p.after_alloc(&ask.id, &tables(&[&[5, 6]]), 0).unwrap();
    at.tokens = 32;
    let second = p.build_step(&[at], NOW).unwrap();
    let (old, new) = (first.expects[0].lease, second.expects[0].lease);
    assert_eq!(second.withdrawals, [Withdrawal { lease: old, why: Reason::Preempted }]);
    assert_eq!((new.number, new.epoch), (old.number, old.epoch + 1));
    assert_eq!((second.saves[0].lease, second.saves[0].part), (new, 0));
    assert_eq!(second.saves[0].tables[0].ids, [5, 6]);
    let finished = p.finish(&ask, FinishStatus::LengthCapped, 32, &[&[5, 6]]);
    assert_eq!(ticket(&finished).lease, new);
    assert_eq!(p.step().grants[0].parts, 1);
}

#[test]
fn too_many_requests_are_not_published_and_counted() {
    let mut config = config("prefill-0", &[attention(16)]);
    config.max_requests = 1;
    let mut p = connector(config);
    assert!(p.publish(&Ask::new("a", 16, for_decode()), &[&[1]]).0.hold);
    let (finished, step) = p.publish(&Ask::new("b", 16, for_decode()), &[&[2]]);
    assert_eq!(finished, Finished::default());
    assert!(step.is_empty());
    assert_eq!(p.stats().unpublished, 1);
}

#[test]
fn a_table_that_ends_before_the_tokens_is_refused_and_nothing_is_held() {
    let mut p = producer(&[attention(16)]);
    let ask = Ask::new("r", 40, for_decode());
    p.on_new_request(&ask.request()).unwrap();
    let blocks = tables(&[&[1, 2]]);
    let finishing = Finishing { status: FinishStatus::LengthCapped, tokens: 40, blocks: &blocks };
    let error = p.request_finished(&ask.request(), &finishing).unwrap_err();
    assert!(error.to_string().contains("ends before the tokens do"), "{error}");
    p.assert_idle();
}

/// What did not fit the step is not copied any more once its request is gone: its blocks may be another's by then.
#[test]
fn what_waits_to_be_copied_is_forgotten_with_its_request() {
    let mut config = config("prefill-0", &[attention(16)]);
    config.host_buffer = true;
    let mut p = connector(config);
    let count = StepMetadata::MAX_ITEMS + 1;
    let asks: Vec<_> = (0..count).map(|i| Ask::new(&format!("r{i}"), 32, for_decode())).collect();
    for ask in &asks {
        p.on_new_request(&ask.request()).unwrap();
        p.after_alloc(&ask.id, &tables(&[&[1, 2]]), 0).unwrap();
    }
    let at = |ask| Scheduled { request: ask, computed: 0, tokens: 16, appended: &[] };
    let scheduled: Vec<_> = asks.iter().map(|ask| at(&ask.id)).collect();
    let step = p.build_step(&scheduled, NOW).unwrap();
    assert_eq!((step.expects.len(), step.saves.len()), (count - 1, count - 1));
    p.finish(&asks[count - 1], FinishStatus::Aborted, 16, &[&[1, 2]]);
    // No worker has heard of its lease, either.
    assert!(p.step().is_empty());
}
