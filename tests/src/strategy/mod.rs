//! [`proptest`] strategies for models, engines' layouts, block tables, requests and limits.
//!
//! What a strategy makes is a *recipe*: a few small numbers, which shrink well and print short. [`Recipe::scene`] makes
//! of it what is tested: a [`Scene`](crate::oracle::Scene) of real layouts and block tables.
//!
//! ```
//! use kvx_tests::{planner, strategy};
//! use proptest::prelude::*;
//!
//! proptest! {
//!     #![proptest_config(strategy::config())]
//!
//!     // In a test file, with #[test] before it.
//!     fn the_planner_is_exact(
//!         recipe in strategy::recipe(strategy::model(), strategy::engine(), strategy::engine()),
//!         trial in strategy::trial(),
//!     ) {
//!         planner::check(&recipe.scene()?, &trial)?;
//!     }
//! }
//! # the_planner_is_exact();
//! ```
//!
//! `KVX_CASES` sets the number of cases, `KVX_SEED` replays a run: see [`config()`].

mod config;
mod engine;
mod model;
mod recipe;
mod strided;
mod tables;
mod trial;

pub use config::{cases, config, seed};
pub use engine::{EngineRecipe, custom_engine, engine, named_engine};
pub use model::{attention, hybrid, latent, model, quantized, windowed};
pub use recipe::{Recipe, recipe};
pub use strided::{Tape, restride, tape};
pub use tables::{BlockOrder, Spare};
pub use trial::trial;
