//! Requests between engines of different shapes, token for token.

use kvx_core::layout::NamedLayout::{FlashAttentionHnd, FlashAttentionNhd};

use crate::kit::{Shape, both_idle, pair, until};

fn moved(from: &Shape, to: &Shape, prompt: u64, prefix: u64) {
    let (mut p, mut d) = pair(from, to);
    let params = p.prefill("p-1", prompt, 48, 3);
    d.arrive("d-2", prompt, &params, 3);
    assert_eq!(d.admit("d-2", prefix), prompt - prefix);
    until(&mut p, &mut d, "received", |_, d| d.received.contains_key("d-2"));
    d.decoded("d-2", prompt - 1);
    both_idle(&mut p, &mut d);
    assert_eq!((p.c.stats().sent, d.c.stats().received), (1, 1));
    let (ranks, loads) = (d.seats.len() as u64, d.c.rank_stats().map(|(_, it)| it.loads));
    assert_eq!(loads.sum::<u64>(), ranks);
    assert!(
        d.c.rank_stats().all(|(_, it)| it.bytes > 0 && it.segments > 0 && it.failed_loads == 0)
    );
}

/// Known failures 1, 10, 25, 31 and 81 (vllm#43523, vllm#26744, vllm#22976, vllm PR#21074, vllm PR#32630): tensor parallel both ways, pipeline stages,
/// blocks of other sizes both ways, a last block that is not full; under names that only their own engine knows.
#[test]
fn any_shape_to_any_other() {
    let nhd = |shape: Shape| Shape { layout: FlashAttentionNhd, ..shape };
    let hnd = |shape: Shape| Shape { layout: FlashAttentionHnd, ..shape };
    for (from, to) in [
        (Shape::new(1, 1, 16), Shape::new(2, 1, 16)),
        (Shape::new(2, 1, 16), Shape::new(1, 1, 16)),
        (Shape::new(1, 2, 16), Shape::new(1, 1, 16)),
        (nhd(Shape::new(1, 1, 16)), hnd(Shape::new(1, 1, 64))),
        (hnd(Shape::new(2, 1, 64)), nhd(Shape::new(4, 1, 16))),
    ] {
        moved(&from, &to, 100, 0);
    }
}

/// Known failure 2 (vllm PR#19691): fewer heads than ranks.
#[test]
fn fewer_heads_than_ranks() {
    let narrow = |tp| {
        let model =
            kvx_core::layout::ModelGeometry::llama_like(2, 2, 8, kvx_core::layout::Dtype::Bf16);
        Shape { model: model.unwrap(), ..Shape::new(tp, 1, 16) }
    };
    moved(&narrow(2), &narrow(4), 40, 0);
    moved(&narrow(4), &narrow(1), 40, 0);
}

/// Known failure 29 (vllm PR#48758): of a request whose prefix is there, only what follows is moved, and to its place. A prefix that ends
/// within the other side's block, too.
#[test]
fn what_follows_a_prefix_is_loaded_and_the_prefix_is_untouched() {
    moved(&Shape::new(1, 1, 16), &Shape::new(1, 1, 16), 100, 48);
    moved(&Shape::new(1, 1, 64), &Shape::new(2, 1, 16), 100, 48);
}

#[test]
fn digests_are_compared_where_that_is_asked_for() {
    let to = Shape { digests: true, ..Shape::new(2, 1, 16) };
    let (mut p, mut d) = pair(&Shape::new(1, 1, 64), &to);
    let params = p.prefill("p", 100, 100, 3);
    d.arrive("d", 100, &params, 3);
    d.admit("d", 32);
    until(&mut p, &mut d, "received", |_, d| d.received.contains_key("d"));
    d.decoded("d", 99);
    for seat in &d.seats {
        let counts = seat.worker.counts();
        assert!(counts.digests_equal > 0 && counts.digests_differing == 0);
    }
    both_idle(&mut p, &mut d);
    // Not by the ranks' own threads; no other test of this program compares digests.
    assert_eq!(threads("kvx-digest"), 3);
    drop((p, d));
    // A thread that was joined may be listed for a moment more.
    let begun = std::time::Instant::now();
    while threads("kvx-digest") > 0 {
        assert!(begun.elapsed() < crate::kit::PATIENCE);
        std::thread::yield_now();
    }
}

/// How many threads of this process have this name.
fn threads(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names =
        tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok());
    names.filter(|comm| comm.trim() == name).count()
}

/// Known failures 26, 27 and 112 (vllm PR#18495, llm-d#759, vllm#44238): many requests at once, between the same ranks.
#[test]
fn many_requests_at_once_keep_apart() {
    let (mut p, mut d) = pair(&Shape::new(2, 1, 16), &Shape::new(1, 1, 64));
    let mut all = Vec::new();
    for number in 0..8_u64 {
        let prompt = 20 + 11 * number;
        let params = p.prefill(&format!("p{number}"), prompt, 32, number);
        let name = format!("d{number}");
        d.arrive(&name, prompt, &params, number);
        d.admit(&name, 0);
        all.push((name, prompt));
    }
    until(&mut p, &mut d, "received", |_, d| d.received.len() == 8);
    for (name, prompt) in all {
        d.decoded(&name, prompt - 1);
    }
    both_idle(&mut p, &mut d);
}
