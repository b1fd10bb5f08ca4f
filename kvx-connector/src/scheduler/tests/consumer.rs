//! The consumer's part.

use super::*;
use crate::ticket::TicketGroup;

/// A block, and a token's place in it.
type Place = (u32, u64);

/// Each token of a load, where it goes and where it comes from, by group.
fn token_map(load: &Load, own: &[CacheGroup]) -> Vec<Vec<(u64, Place, Place)>> {
    let place = |table: &Table, block_tokens: u32, token: u64| {
        let block_tokens = u64::from(block_tokens);
        let at = (token / block_tokens).checked_sub(table.first)?;
        let id = table.ids.get(usize::try_from(at).unwrap())?;
        Some((*id, token % block_tokens))
    };
    let group = |((local, remote), own): ((&Table, &TicketGroup), &CacheGroup)| {
        let token = |token| {
            let local = place(local, own.block_tokens, token)?;
            let remote = place(&remote.table, remote.block_tokens, token)?;
            Some((token, local, remote))
        };
        load.tokens.clone().filter_map(token).collect()
    };
    load.local.iter().zip(&load.remote).zip(own).map(group).collect()
}

#[test]
fn a_request_is_loaded_once_every_rank_has_it() {
    let groups = [attention(16)];
    let mut c = consumer(&groups);
    let ask = Ask::from("d", 40, ticket_for(&groups, 40, &[&[7, 3, 12]]));
    c.on_new_request(&ask.request()).unwrap();
    assert_eq!(c.step().holds.len(), 1);
    let matched = c.matched_tokens(&ask.request(), 0).unwrap();
    assert_eq!(matched, Matched::Tokens { tokens: 40, asynchronous: true });
    c.after_alloc(&ask.id, &tables(&[&[40, 41, 42]]), 40).unwrap();
    let step = c.step();
    assert!(step.holds.is_empty() && step.releases.is_empty());
    let load = &step.loads[0];
    assert_eq!((load.tokens.clone(), load.local[0].ids.as_slice()), (0..40, &[40, 41, 42][..]));
    assert_eq!(load.remote[0].table.ids, [7, 3, 12]);
    assert!(c.loaded(0, load.attempt).is_empty());
    assert!(c.loaded(0, load.attempt).is_empty());
    let updates = c.loaded(1, load.attempt);
    assert_eq!(updates.received, [Received { request: id("d"), computed: 39 }]);
    // vLLM says so again when it schedules the request.
    c.after_alloc(&ask.id, &tables(&[&[40, 41, 42]]), 0).unwrap();
    assert!(c.step().is_empty());
    assert!(!c.finish(&ask, FinishStatus::Stopped, 60, &[&[40, 41, 42, 43]]).hold);
    c.assert_idle();
    assert_eq!(c.stats().received, 1);
    assert_eq!(c.stats().released, 0);
}

#[test]
fn a_request_is_held_from_when_it_is_first_seen_until_it_loads() {
    let groups = [attention(16)];
    let mut c = consumer(&groups);
    let ask = Ask::from("d", 16, ticket_for(&groups, 16, &[&[7]]));
    // An engine that has no on_new_request asks for tokens first.
    for _ in 0..3 {
        c.matched_tokens(&ask.request(), 0).unwrap();
    }
    let step = c.step();
    assert_eq!(step.holds.len(), 1);
    assert!(c.step().is_empty() && !c.has_pending(NOW));
    let (_, loads) = c.load(&ask, 0, &[&[9]]);
    assert_eq!(loads.loads[0].attempt, step.holds[0].attempt);
    assert_eq!(loads.loads[0].source, step.holds[0].source);
}

/// Known failure 9 (vllm#28925): a logical block of 128 tokens on a kernel's of 64, on both sides: block by block.
#[test]
fn equal_logical_blocks_map_one_to_one() {
    let groups = [CacheGroup { kernel_block_tokens: 64, ..attention(128) }];
    let ask = Ask::from("d", 256, ticket_for(&groups, 256, &[&[3, 7]]));
    let load = consumer(&groups).load(&ask, 0, &[&[8, 9]]).1.loads.remove(0);
    assert_eq!(
        (load.remote[0].block_tokens, load.remote[0].table.ids.as_slice()),
        (128, &[3, 7][..])
    );
    assert_eq!(load.local[0].ids, [8, 9]);
}

/// Known failure 11 (vllm#42895): blocks of 12 tokens to blocks of 20, with a prefix that the consumer has: every token that is
/// wanted has one place on either side.
#[test]
fn blocks_of_sizes_that_do_not_divide_map_token_by_token() {
    let own = [attention(20)];
    let ask =
        Ask::from("d", 100, ticket_for(&[attention(12)], 100, &[&(1..10).collect::<Vec<_>>()]));
    let (tokens, step) = consumer(&own).load(&ask, 40, &[&[50, 51, 52, 53, 54]]);
    assert_eq!(tokens, 60);
    let map = token_map(&step.loads[0], &own).remove(0);
    let expected: Vec<_> = (40..100_u32)
        .map(|t| (t.into(), (50 + t / 20, (t % 20).into()), (1 + t / 12, (t % 12).into())))
        .collect();
    assert_eq!(map, expected);
    // Nothing that is not needed is named.
    assert_eq!(step.loads[0].local[0].ids, [52, 53, 54]);
    assert_eq!(step.loads[0].remote[0].table.ids, [4, 5, 6, 7, 8, 9]);
}

/// Known failure 23 (vllm#42554): of `[0, 0, 14]` only 14 is loaded.
#[test]
fn placeholders_are_not_loaded() {
    let groups = [state(), attention(16)];
    let ask = Ask::from("d", 41, ticket_for(&groups, 40, &[&[0, 0, 7], &[0, 4, 5]]));
    let (tokens, step) = consumer(&groups).load(&ask, 0, &[&[0, 0, 14], &[0, 8, 9]]);
    assert_eq!(tokens, 40);
    let load = &step.loads[0];
    assert_eq!(
        (load.local[0].ids.as_slice(), load.local[1].ids.as_slice()),
        (&[14][..], &[8, 9][..])
    );
    assert_eq!(load.remote[0].table.ids, [7]);
    assert_eq!((load.local[1].first, load.remote[1].table.first), (1, 1));
}

/// Known failures 28 (vllm#18490) and 84 (vllm#58108): where nothing is to be loaded, the lease is given back: because the
/// consumer has the whole prompt, or because its engine takes nothing of what was offered.
#[test]
fn a_lease_of_which_nothing_is_needed_is_given_back() {
    let groups = [attention(16)];
    for computed in [40, 0] {
        let mut c = consumer(&groups);
        let ask = Ask::from("d", 40, ticket_for(&groups, 40, &[&[7, 3, 12]]));
        c.on_new_request(&ask.request()).unwrap();
        let matched = c.matched_tokens(&ask.request(), computed).unwrap();
        assert_eq!(matched.tokens(), Some(40 - computed));
        c.after_alloc(&ask.id, &tables(&[&[40, 41, 42]]), 0).unwrap();
        let step = c.step();
        assert_eq!((step.releases.len(), step.holds.len(), step.loads.len()), (1, 0, 0));
        assert_eq!(c.matched_tokens(&ask.request(), 0).unwrap(), Matched::NONE);
        assert!(!c.finish(&ask, FinishStatus::Stopped, 50, &[&[40, 41, 42, 43]]).hold);
        assert!(c.step().is_empty());
        c.assert_idle();
    }
}

/// Known failure 29 (vllm#48758): of the producer's blocks 10 to 17 the last three go to 40, 41, 42, in this order.
#[test]
fn a_prefix_is_cut_from_the_front_on_both_sides() {
    let groups = [attention(4)];
    let ask = Ask::from("d", 32, ticket_for(&groups, 32, &[&(10..18).collect::<Vec<_>>()]));
    let own = [1, 2, 3, 4, 5, 40, 41, 42];
    let load = consumer(&groups).load(&ask, 20, &[&own]).1.loads.remove(0);
    assert_eq!(load.remote[0].table, Table { first: 5, ids: vec![15, 16, 17] });
    assert_eq!(load.local[0], Table { first: 5, ids: vec![40, 41, 42] });
    // The same from an engine that shows only the blocks that are to be filled.
    let mut c = consumer(&groups);
    c.matched_tokens(&ask.request(), 20).unwrap();
    let tail = BlockTable::tail(&[40, 41, 42], 32, 4).unwrap();
    c.after_alloc(&ask.id, &[tail], 12).unwrap();
    assert_eq!(c.step().loads[0].local, load.local);
}

/// Known failures 30 (vllm#52617) and 33 (vllm#26896): whoever keeps the last token back, one token of the prompt is left to
/// compute, and no more than was promised is loaded.
#[test]
fn one_token_is_left_to_compute() {
    let groups = [attention(16)];
    let blocks: Vec<_> = (1..57).collect();
    for (last_token, loaded, computed) in [
        (LastToken::EngineRecomputes, 895, 894),
        (LastToken::Withheld, 894, 894),
        (LastToken::NotNeeded, 895, 895),
    ] {
        let mut config = config("decode-0", &groups);
        config.last_token = last_token;
        let mut c = connector(config);
        let ask = Ask::from("d", 895, ticket_for(&groups, 895, &[&blocks]));
        let (tokens, step) = c.load(&ask, 0, &[&blocks]);
        assert_eq!(tokens, loaded);
        assert_eq!(step.loads[0].tokens, 0..loaded);
        c.loaded(0, step.loads[0].attempt);
        assert_eq!(c.loaded(1, step.loads[0].attempt).received[0].computed, computed);
    }
}

/// A state is that after the ticket's last token: of use only if that is where the consumer goes on from.
#[test]
fn a_state_is_taken_whole_or_not_at_all() {
    let groups = [attention(16), state()];
    let matched = |last_token, tokens, prompt| {
        let mut config = config("decode-0", &groups);
        config.last_token = last_token;
        let ask = Ask::from("d", prompt, ticket_for(&groups, tokens, &[&[1, 2, 3], &[4]]));
        connector(config).matched_tokens(&ask.request(), 0).unwrap().tokens().unwrap()
    };
    for last_token in [LastToken::EngineRecomputes, LastToken::Withheld] {
        assert_eq!(matched(last_token, 40, 40), 0);
        assert_eq!(matched(last_token, 39, 40), 39);
    }
    assert_eq!(matched(LastToken::NotNeeded, 40, 40), 40);
    let produced = |last_token, groups: &[CacheGroup]| {
        let mut config = config("prefill-0", groups);
        config.last_token = last_token;
        config.tokens_to_produce(40)
    };
    assert_eq!(produced(LastToken::EngineRecomputes, &groups), 39);
    assert_eq!(produced(LastToken::EngineRecomputes, &groups[..1]), 40);
    assert_eq!(produced(LastToken::Withheld, &groups[..1]), 39);
    assert_eq!(produced(LastToken::NotNeeded, &groups), 40);
}

#[test]
fn a_window_is_taken_whole_or_not_at_all() {
    let groups = [attention(16)];
    let mut config = config("decode-0", &groups);
    config.last_token = LastToken::Withheld;
    // The producer has dropped block 0: what token 39 needs may be gone with it.
    let ask = Ask::from("d", 40, ticket_for(&groups, 40, &[&[0, 8, 9]]));
    assert_eq!(connector(config.clone()).matched_tokens(&ask.request(), 0).unwrap(), Matched::NONE);
    let ask = Ask::from("d", 41, ticket_for(&groups, 40, &[&[0, 8, 9]]));
    assert_eq!(connector(config).matched_tokens(&ask.request(), 0).unwrap().tokens(), Some(40));
}

/// Known failure 39 (vllm#41269): rejected before admission, known or not: the lease is given back, once.
#[test]
fn a_rejected_request_gives_its_lease_back() {
    let groups = [attention(16)];
    for known in [false, true] {
        let mut c = consumer(&groups);
        let ask = Ask::from("d", 16, ticket_for(&groups, 16, &[&[7]]));
        if known {
            c.on_new_request(&ask.request()).unwrap();
            assert_eq!(c.step().holds.len(), 1);
        }
        c.rejected(&ask.request());
        c.rejected(&ask.request());
        let step = c.step();
        assert_eq!((step.releases.len(), step.holds.len()), (1, 0));
        c.assert_idle();
        assert_eq!(c.stats().released, 1);
    }
}

/// Known failures 40 (vllm#46283) and 41 (vllm-ascend#16662): aborted while it loads: its blocks are held until every rank has
/// ended the load, whichever way; that is said once, and what comes later is nobody's.
#[test]
fn an_aborted_load_keeps_its_blocks_until_it_has_ended() {
    let groups = [attention(16)];
    let mut c = consumer(&groups);
    let ask = Ask::from("d", 16, ticket_for(&groups, 16, &[&[7]]));
    let attempt = c.load(&ask, 0, &[&[9]]).1.loads[0].attempt;
    c.loaded(0, attempt);
    assert!(c.finish(&ask, FinishStatus::Aborted, 0, &[&[9]]).hold);
    assert!(c.finish(&ask, FinishStatus::Aborted, 0, &[&[9]]).hold);
    assert!(c.on_new_request(&ask.request()).is_err(), "the name is still in use");
    let step = c.step();
    assert_eq!((step.aborts.as_slice(), step.releases.len()), (&[attempt][..], 0));
    assert!(c.loaded(0, attempt).is_empty());
    let updates = c.load_end(1, LoadEnd::new(attempt, LoadOutcome::Aborted, ""));
    assert_eq!(updates, Updates { drained: vec![id("d")], ..Updates::default() });
    assert!(c.loaded(1, attempt).is_empty());
    c.assert_idle();
    assert_eq!(c.stats().stray_reports, 2);
}

#[test]
fn an_abort_before_the_workers_knew_of_the_load_holds_nothing() {
    let groups = [attention(16)];
    let mut c = consumer(&groups);
    let ask = Ask::from("d", 16, ticket_for(&groups, 16, &[&[7]]));
    c.matched_tokens(&ask.request(), 0).unwrap();
    c.after_alloc(&ask.id, &tables(&[&[9]]), 16).unwrap();
    assert!(!c.finish(&ask, FinishStatus::Aborted, 0, &[&[9]]).hold);
    let step = c.step();
    assert_eq!((step.loads.len(), step.holds.len(), step.releases.len()), (0, 0, 1));
    c.assert_idle();
}

/// Known failure 47 (vllm#52234): a ticket that was used is not used again. A request that comes with the same one while the
/// first waits or loads is asked again later.
#[test]
fn a_ticket_is_used_once() {
    let groups = [attention(16)];
    let mut c = consumer(&groups);
    let params = ticket_for(&groups, 16, &[&[7]]);
    let asks = ["a", "b", "c"].map(|name| Ask::from(name, 16, params.clone()));
    let attempt = c.load(&asks[0], 0, &[&[9]]).1.loads[0].attempt;
    assert_eq!(c.matched_tokens(&asks[1].request(), 0).unwrap(), Matched::AskLater);
    (0..2).for_each(|rank| drop(c.loaded(rank, attempt)));
    for ask in &asks[1..] {
        assert_eq!(c.matched_tokens(&ask.request(), 0).unwrap(), Matched::NONE);
        c.after_alloc(&ask.id, &tables(&[&[10]]), 0).unwrap();
    }
    assert!(c.step().is_empty());
    assert_eq!((c.stats().used_tickets, c.stats().loads), (2, 1));
}

/// Known failures 60 (sglang#6857) and 63 (vllm#18631): loaded and then preempted, or loaded while there was no room to run:
/// the request is not loaded again, and its lease not given back a second time.
#[test]
fn what_was_loaded_is_not_loaded_again() {
    let groups = [attention(16)];
    for preempted in [false, true] {
        let mut c = consumer(&groups);
        let ask = Ask::from("d", 16, ticket_for(&groups, 16, &[&[7]]));
        let attempt = c.load(&ask, 0, &[&[9]]).1.loads[0].attempt;
        (0..2).for_each(|rank| drop(c.loaded(rank, attempt)));
        if preempted {
            assert!(!c.preempted(&ask.id));
        }
        assert_eq!(c.matched_tokens(&ask.request(), 0).unwrap(), Matched::NONE);
        assert!(c.after_alloc(&ask.id, &tables(&[&[9]]), 16).is_err());
        c.after_alloc(&ask.id, &tables(&[&[9]]), 0).unwrap();
        assert!(c.step().is_empty());
        c.finish(&ask, FinishStatus::Stopped, 20, &[&[9, 10]]);
        c.assert_idle();
    }
}

#[test]
fn a_request_preempted_while_it_loads_keeps_its_old_blocks_until_they_are_quiet() {
    let groups = [attention(16)];
    let mut c = consumer(&groups);
    let ask = Ask::from("d", 16, ticket_for(&groups, 16, &[&[7]]));
    let attempt = c.load(&ask, 0, &[&[9]]).1.loads[0].attempt;
    assert!(c.preempted(&ask.id));
    assert_eq!(c.step().aborts, [attempt]);
    assert_eq!(c.matched_tokens(&ask.request(), 0).unwrap(), Matched::NONE);
    c.loaded(0, attempt);
    assert_eq!(c.loaded(1, attempt).drained, [id("d")]);
    assert!(!c.finish(&ask, FinishStatus::Stopped, 20, &[&[10, 11]]).hold);
    c.assert_idle();
}

/// Known failure 61 (sglang#30233): the producer gave up, so there is no ticket: the request is computed here, or fails.
#[test]
fn without_a_ticket_nothing_is_taken_for_loaded() {
    let groups = [attention(16)];
    let mut p = producer(&groups);
    let ask = Ask::new("p", 16, for_decode());
    p.on_new_request(&ask.request()).unwrap();
    assert_eq!(p.finish(&ask, FinishStatus::Aborted, 8, &[&[1]]).params, None);
    let ask = Ask::new("d", 16, json!({"do_remote_prefill": true}));
    let mut c = consumer(&groups);
    for _ in 0..3 {
        assert_eq!(c.matched_tokens(&ask.request(), 0).unwrap(), Matched::NONE);
    }
    assert_eq!(c.stats().bad_tickets, 1);
    c.rejected(&ask.request());
    c.assert_idle();
    let mut config = config("decode-0", &groups);
    config.on_failure = OnFailure::Fail;
    let error = connector(config).matched_tokens(&ask.request(), 0).unwrap_err();
    assert!(error.to_string().contains("kvx: is not there"), "{error}");
}

/// Known failure 64 (vllm#45388): 7 blocks, A needs 4 and one more, B needs 3 and one more: loaded both, neither could run.
#[test]
fn two_loads_do_not_fill_the_pool_and_wait_for_each_other() {
    let groups = [attention(16)];
    let mut config = config("decode-0", &groups);
    config.pool_blocks = Some(7);
    let mut c = connector(config);
    let a = Ask::from("a", 64, ticket_for(&groups, 64, &[&[1, 2, 3, 4]]));
    let mut p = connector(super::config("prefill-1", &groups));
    let b = p.publish(&Ask::new("p", 48, for_decode()), &[&[5, 6, 7]]).0.params;
    let b = Ask::from("b", 48, b);
    let attempt = c.load(&a, 0, &[&[1, 2, 3, 4]]).1.loads[0].attempt;
    assert_eq!(c.matched_tokens(&b.request(), 0).unwrap(), Matched::AskLater);
    (0..2).for_each(|rank| drop(c.loaded(rank, attempt)));
    assert_eq!(c.matched_tokens(&b.request(), 0).unwrap(), Matched::AskLater);
    // A runs.
    let at = Scheduled { request: &a.id, computed: 63, tokens: 1, appended: &[] };
    c.build_step(&[at], NOW).unwrap();
    assert_eq!(c.matched_tokens(&b.request(), 0).unwrap().tokens(), Some(48));
    // One that is too large for the pool is still let through when it is alone: the engine decides.
    let mut alone = super::config("decode-1", &groups);
    alone.pool_blocks = Some(2);
    assert_eq!(connector(alone).matched_tokens(&a.request(), 0).unwrap().tokens(), Some(64));
}

#[test]
fn a_request_may_come_from_one_engine_and_go_to_another() {
    let groups = [attention(16)];
    let mut c = consumer(&groups);
    let mut params = ticket_for(&groups, 16, &[&[7]]);
    if let Some(params) = &mut params {
        params.insert("do_remote_decode".into(), true.into());
    }
    let ask = Ask::from("d", 16, params);
    let (_, step) = c.load(&ask, 0, &[&[9]]);
    let lease = step.expects[0].lease;
    assert_ne!(lease, step.loads[0].source.lease);
    (0..2).for_each(|rank| drop(c.loaded(rank, step.loads[0].attempt)));
    assert!(c.finish(&ask, FinishStatus::LengthCapped, 16, &[&[9]]).hold);
    assert_eq!(c.step().grants[0].lease, lease);
}

#[test]
fn more_than_was_promised_is_refused() {
    let groups = [attention(16)];
    let mut c = consumer(&groups);
    let ask = Ask::from("d", 40, ticket_for(&groups, 40, &[&[7, 3, 12]]));
    let own = tables(&[&[40, 41, 42]]);
    assert!(c.after_alloc(&ask.id, &own, 40).is_err(), "nothing was asked");
    c.on_new_request(&ask.request()).unwrap();
    assert!(c.after_alloc(&ask.id, &own, 40).is_err(), "nothing was asked");
    c.matched_tokens(&ask.request(), 16).unwrap();
    assert!(c.after_alloc(&ask.id, &own, 25).is_err());
    assert!(c.after_alloc(&ask.id, &tables(&[&[40, 41]]), 24).is_err(), "too few blocks");
    assert!(c.after_alloc(&ask.id, &[], 24).is_err(), "no table");
    // Fewer is fine: the engine computes the rest.
    c.after_alloc(&ask.id, &own, 10).unwrap();
    assert_eq!(c.step().loads[0].tokens, 16..26);
}

#[test]
fn too_many_requests_are_asked_again_later() {
    let groups = [attention(16)];
    let mut config = config("decode-0", &groups);
    config.max_requests = 1;
    let mut c = connector(config);
    let a = Ask::from("a", 16, ticket_for(&groups, 16, &[&[7]]));
    let mut p = connector(super::config("prefill-1", &groups));
    let b = Ask::from("b", 16, p.publish(&Ask::new("p", 16, for_decode()), &[&[5]]).0.params);
    assert_eq!(c.matched_tokens(&a.request(), 0).unwrap().tokens(), Some(16));
    assert_eq!(c.matched_tokens(&b.request(), 0).unwrap(), Matched::AskLater);
    // Given up while it waited to be asked: its lease is given back all the same.
    c.finish(&b, FinishStatus::Aborted, 0, &[&[]]);
    assert_eq!(c.step().releases.len(), 1);
}
