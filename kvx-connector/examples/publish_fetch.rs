//! Two engines of different shapes in one process: one publishes a request's blocks, the other fetches them.
//!
//! `cargo run -p kvx-connector --features shm --example publish_fetch`
#![expect(clippy::print_stdout, reason = "it is what this program is for")]

use kvx_connector::Policy;
use kvx_connector::control::{Key, Security};
use kvx_connector::engine::{Engine, EngineSetup, RankParts};
use kvx_connector::protocol::TransferKey;
use kvx_connector::ticket::Table;
use kvx_core::Result;
use kvx_core::config::BackendConfig;
use kvx_core::layout::{Dtype, Grid, LayoutBuilder, ModelGeometry, NamedLayout};

const TOKENS: u64 = 100;

/// An engine of `tp` ranks whose blocks have `block` tokens.
async fn engine(name: &str, key: &Key, layout: NamedLayout, tp: u32, block: u32) -> Result<Engine> {
    let model = ModelGeometry::llama_like(4, 8, 64, Dtype::Bf16)?;
    let builder = LayoutBuilder::new(&model, layout).block_tokens(block).blocks(64);
    let mut ranks = Vec::new();
    for layout in builder.build_replica(Grid::new(tp, 1, 1)?, 0)? {
        let policy = Policy::default().with_name(Some("shm"));
        let choice = kvx_connector::choose(&policy, None)?;
        let backend = kvx_connector::open(&choice, &BackendConfig::new()).await?;
        let regions = layout
            .regions()
            .iter()
            .map(|spec| backend.allocate(spec.bytes))
            .collect::<Result<_>>()?;
        let (backends, choosing) = (vec![backend], Box::new(policy));
        ranks.push(RankParts { layout, regions, backends, choosing });
    }
    // All engines of a deployment have the key; see `Key::from_file`.
    let security = Security::with_key(key.clone());
    let mut setup =
        EngineSetup::new(name.parse()?, "127.0.0.1:0".parse()?, security, model.facts()?, ranks);
    setup.digests = true;
    Engine::start(setup)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let key = Key::generate()?;
    let prefill = engine("prefill", &key, NamedLayout::FlashAttentionHnd, 2, 16).await?;
    let decode = engine("decode", &key, NamedLayout::FlashAttentionNhd, 1, 32).await?;

    // The prompt has been read: its cache is in these blocks, which stay as they are until the lease is over.
    let blocks = Table { first: 0, ids: (0..7).collect() };
    let published = prefill.publish(TransferKey::new("request-1")?, TOKENS, &[blocks])?;

    // The ticket went through a router. The decoding engine has found room, and fetches.
    let room = Table { first: 0, ids: vec![9, 3, 5, 1] };
    let fetch = decode.fetch(published.ticket(), 0..TOKENS, &[room])?;
    match fetch.over().await {
        Ok(reports) => {
            for report in reports {
                let ways: Vec<_> = report.transports.into_iter().collect();
                println!("{} bytes over {} in {:?}", report.bytes, ways.join(", "), report.elapsed);
            }
        }
        Err(failure) => println!("not fetched: {failure}"),
    }
    let why: Vec<String> = published.over().await?.iter().map(ToString::to_string).collect();
    println!("the lease is over: {}; its blocks may be used again", why.join(", "));
    Ok(())
}
