//! Every pair of named layouts with every small pair of rank grids, for several head counts and block sizes: all of them,
//! not a sample. (In builds with debug assertions, every 19th.)

#![expect(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "helpers of tests")]

use kvx_core::layout::{Dtype, ModelGeometry, NamedLayout};
use kvx_core::transfer::Mode;
use kvx_tests::planner;
use kvx_tests::planner::Trial;
use kvx_tests::strategy::{BlockOrder, EngineRecipe, Recipe};

const GRIDS: [(u32, u32); 10] =
    [(1, 1), (2, 1), (3, 1), (4, 1), (8, 1), (1, 2), (2, 2), (3, 2), (4, 2), (8, 2)];
const HEADS: [u32; 3] = [4, 6, 1];
/// Of the producer's and the consumer's blocks: 16/16, 16/32, 32/16 and 12/20, scaled down.
const BLOCKS: [(u32, u32); 4] = [(2, 2), (2, 4), (4, 2), (3, 5)];

/// All pairs of layouts, of grids, and all head counts, with these blocks.
fn every_pair((from_tokens, to_tokens): (u32, u32)) {
    // The last block of neither side is full.
    let tokens = 7;
    let step = if cfg!(debug_assertions) { 19 } else { 1 };
    let mut number = 0_usize;
    let mut tried = 0_u32;
    for heads in HEADS {
        let model = ModelGeometry::llama_like(2, heads, 2, Dtype::Fp8E4m3).unwrap();
        for from_layout in NamedLayout::ALL {
            for to_layout in NamedLayout::ALL {
                for from_grid in GRIDS {
                    for to_grid in GRIDS {
                        number += 1;
                        if !number.is_multiple_of(step) {
                            continue;
                        }
                        let engine = |layout, tokens, (tp, pp): (u32, u32), order| EngineRecipe {
                            order,
                            ..EngineRecipe::plain(layout, tokens).with_grid(tp, pp)
                        };
                        let order = match number % 3 {
                            0 => BlockOrder::Contiguous,
                            1 => BlockOrder::Reversed,
                            _ => BlockOrder::Permuted(1),
                        };
                        let producer =
                            engine(from_layout, from_tokens, from_grid, BlockOrder::Contiguous);
                        let consumer = engine(to_layout, to_tokens, to_grid, order);
                        let mode = if number.is_multiple_of(2) { Mode::Read } else { Mode::Write };
                        let recipe = Recipe::whole(model.clone(), producer, consumer, tokens);
                        let scene = recipe.scene().unwrap();
                        let moved = planner::check(&scene, &Trial { mode, ..Trial::default() })
                            .unwrap_or_else(|fault| panic!("{mode}: {recipe:#?}\n{fault}"));
                        assert!(moved.bytes > 0);
                        tried += 1;
                    }
                }
            }
        }
    }
    println!("{tried} scenes");
    assert!(tried as usize >= HEADS.len() * 10_000 / step);
}

#[test]
fn every_pair_with_equal_blocks() {
    every_pair(BLOCKS[0]);
}

#[test]
fn every_pair_with_blocks_twice_as_long_on_the_consumer() {
    every_pair(BLOCKS[1]);
}

#[test]
fn every_pair_with_blocks_twice_as_long_on_the_producer() {
    every_pair(BLOCKS[2]);
}

#[test]
fn every_pair_with_blocks_of_which_neither_divides_the_other() {
    every_pair(BLOCKS[3]);
}
