//! What planning costs: compiling for a peer, and listing a request's segments.
//!
//! The column of items is segments per second (for `small_requests`, requests per second). Allocations are counted: none may depend
//! on the number of segments.

use divan::counter::ItemsCount;
use divan::{AllocProfiler, Bencher, black_box};
use kvx_benches::{Blocks, Pair, Side};
use kvx_core::capability::Limits;
use kvx_core::layout::NamedLayout::{
    self, CrossLayerHnd, FlashAttentionHnd as Hnd, FlashAttentionNhd as Nhd, PackedHnd,
};
use kvx_core::plan::SegmentList;
use kvx_core::transfer::Mode;

#[global_allocator]
static ALLOC: AllocProfiler = AllocProfiler::system();

fn main() {
    divan::main();
}

const LLAMA: &str = "llama-3.1-8b";

fn list(bencher: Bencher<'_, '_>, pair: &Pair) {
    let plan = pair.plan().expect("the layouts map");
    let mut segments = SegmentList::new();
    pair.with_request(|request| {
        let mut run = || {
            plan.segments(request, Mode::Read, &Limits::unlimited(), &mut segments)
                .expect("the request is valid");
            segments.len()
        };
        let count = run();
        bencher.counter(ItemsCount::new(count)).bench_local(|| black_box(run()));
    });
}

fn pair(sides: (Side, Side), blocks: Blocks, tokens: u32) -> Pair {
    Pair::new(LLAMA, sides, blocks, tokens, tokens).expect("the layouts are valid")
}

/// 512 permuted blocks of 64 tensors: 32,768 segments of 32 KiB. At most 10 ns each.
#[divan::bench(args = [Nhd, Hnd])]
fn whole_blocks_permuted(bencher: Bencher<'_, '_>, layout: NamedLayout) {
    list(bencher, &pair((Side::new(layout), Side::new(layout)), Blocks::Permuted, 8192));
}

/// The same blocks, one after the other: 32,768 runs that merge to 64 segments.
#[divan::bench]
fn whole_blocks_contiguous(bencher: Bencher<'_, '_>) {
    list(bencher, &pair((Side::new(Nhd), Side::new(Nhd)), Blocks::Contiguous, 8192));
}

/// All layers of a block are one run.
#[divan::bench]
fn cross_layer_permuted(bencher: Bencher<'_, '_>) {
    list(
        bencher,
        &pair((Side::new(CrossLayerHnd), Side::new(CrossLayerHnd)), Blocks::Permuted, 8192),
    );
}

/// Rows of one head and token: 256 bytes each.
#[divan::bench]
fn heads_and_tokens_swapped(bencher: Bencher<'_, '_>) {
    list(bencher, &pair((Side::new(Hnd), Side::new(Nhd)), Blocks::Permuted, 512));
}

/// Two producer blocks in each consumer block, interleaved head by head.
#[divan::bench]
fn blocks_of_another_size(bencher: Bencher<'_, '_>) {
    let sides = (Side::new(Hnd), Side::new(Hnd).block_tokens(32));
    list(bencher, &pair(sides, Blocks::Permuted, 8192));
}

/// Keys and values apart into packed K|V rows: rows of two tensors interleave.
#[divan::bench]
fn apart_into_packed_rows(bencher: Bencher<'_, '_>) {
    list(bencher, &pair((Side::new(Hnd), Side::new(PackedHnd)), Blocks::Permuted, 512));
}

/// Compiling for one peer. Under 1 ms, whatever the number of blocks.
#[divan::bench(args = [LLAMA, "deepseek-v3"])]
fn compile(bencher: Bencher<'_, '_>, model: &str) {
    let pair = Pair::new(model, (Side::new(Hnd), Side::new(Nhd)), Blocks::Contiguous, 16, 1 << 20)
        .expect("the layouts are valid");
    bencher.bench(|| pair.plan().expect("the layouts map"));
}

/// One request of one block and 64 tensors. At least 100,000 per second on one core.
#[divan::bench]
fn small_requests(bencher: Bencher<'_, '_>) {
    let pair = pair((Side::new(Nhd), Side::new(Nhd)), Blocks::Contiguous, 16);
    let plan = pair.plan().expect("the layouts map");
    let mut segments = SegmentList::new();
    pair.with_request(|request| {
        bencher.counter(ItemsCount::new(1_u32)).bench_local(|| {
            plan.segments(black_box(request), Mode::Read, &Limits::unlimited(), &mut segments)
                .expect("the request is valid");
            black_box(segments.len())
        });
    });
}
