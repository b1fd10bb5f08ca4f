//! Moves one request's cache from a prefill engine of one rank to a decode engine of two, in this process: register, plan,
//! meet, move.
//!
//! ```console
//! $ cargo run -p kvx-connector --features mock --example move_blocks
//! ```

#![expect(clippy::print_stdout, reason = "it is what this program is for")]

use kvx_connector::{Choice, Policy, choose, open};
use kvx_core::capability::Limits;
use kvx_core::id::PeerId;
use kvx_core::layout::{Dtype, Grid, LayoutBuilder, ModelGeometry, NamedLayout, RankLayout, Role};
use kvx_core::memory::{KeyBlob, Region};
use kvx_core::plan::{BlockTable, Pairing, PeerPlan, Request, SegmentList};
use kvx_core::port::{Port, RegionSet};
use kvx_core::transfer::Mode;
use kvx_core::{Error, ErrorKind, Result};

/// Tokens of the request: three blocks of the producer's, two of the consumer's.
const TOKENS: u64 = 40;

/// One rank: its layout, the memory in that layout, and its port to the fabric.
struct Rank {
    layout: RankLayout,
    regions: Vec<Region>,
    port: Port,
    set: RegionSet,
    /// What a peer needs to reach the regions.
    keys: Vec<(KeyBlob, u64)>,
}

impl Rank {
    async fn new(layout: RankLayout, choice: &Choice, policy: &Policy) -> Result<Self> {
        let port = Port::new(open(choice, &policy.options).await?)?;
        // One region of memory for each that the layout has, in that order. An engine registers its own cache instead.
        let specs = layout.regions().iter();
        let regions = specs.map(|spec| Region::host(spec.bytes)).collect::<Result<Vec<_>>>()?;
        let handles = regions.iter().map(|region| port.register(region));
        let handles = handles.collect::<Result<Vec<_>>>()?;
        let keys = handles.iter().zip(&regions);
        let keys = keys.map(|(handle, region)| Ok((port.key_blob(*handle)?, region.bytes())));
        let (keys, set) = (keys.collect::<Result<_>>()?, port.region_set(&handles)?);
        Ok(Self { layout, regions, port, set, keys })
    }

    /// Calls `with` with the region and offset of every element of the request, and with the element's name: layer and role,
    /// token, global head, dim.
    fn elements(
        &self,
        table: &[u32],
        mut with: impl FnMut(&Region, u64, u64) -> Result<()>,
    ) -> Result<()> {
        for tensor in self.layout.tensors() {
            let group = &self.layout.groups()[tensor.group as usize];
            let region = &self.regions[tensor.region as usize];
            for token in 0..TOKENS {
                let (entry, slot) =
                    (token / u64::from(group.block_tokens), token % u64::from(group.block_tokens));
                let block = u64::from(table[usize::try_from(entry).unwrap_or(usize::MAX)]);
                for head in 0..u64::from(tensor.head.extent) {
                    for dim in 0..u64::from(tensor.dim.extent) {
                        let offset = tensor.base
                            + block * tensor.block.stride
                            + slot * tensor.token.stride
                            + head * tensor.head.stride
                            + dim * tensor.dim.stride;
                        let global = head + u64::from(tensor.heads.first);
                        let layer =
                            u64::from(tensor.layer) * 2 + u64::from(tensor.role == Role::Value);
                        let name = ((layer * TOKENS + token) * 31 + global) * 257 + dim;
                        with(region, offset, name)?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// The handshake: bytes out, bytes in, by whatever channel there is; then the keys. Gives what each calls the other.
async fn meet(consumer: &Rank, producer: &Rank) -> Result<(PeerId, PeerId)> {
    let offer = consumer.port.offer()?;
    let (consumer_there, reply) = producer.port.accept(&offer)?;
    let (producer_here, completion) = consumer.port.complete(&reply)?;
    producer.port.finish(&completion)?;
    consumer.port.connect(producer_here).await?;
    consumer.port.add_regions(producer_here, &producer.keys)?;
    Ok((producer_here, consumer_there))
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    // The mock is never chosen unasked: KVX_BACKEND names another.
    let policy = Policy::from_env()?;
    let mock = policy.environment.is_none().then_some("mock");
    let policy = policy.with_name(mock);
    let choice = choose(&policy, None)?;
    println!("backend {choice}");

    // How each side's cache lies. Heads are outside a block here and inside there, and blocks have other sizes.
    let model = ModelGeometry::llama_like(2, 4, 16, Dtype::Bf16)?;
    let layouts = |named, block_tokens, tp| {
        LayoutBuilder::new(&model, named)
            .block_tokens(block_tokens)
            .blocks(16)
            .null_block(Some(0))
            .build_replica(Grid::new(tp, 1, 1)?, 0)
    };
    let from = layouts(NamedLayout::FlashAttentionHnd, 16, 1)?;
    let to = layouts(NamedLayout::FlashAttentionNhd, 32, 2)?;

    // Register.
    let (mut producers, mut consumers) = (Vec::new(), Vec::new());
    for (layouts, ranks) in [(&from, &mut producers), (&to, &mut consumers)] {
        for layout in layouts {
            ranks.push(Rank::new(layout.clone(), &choice, &policy).await?);
        }
    }
    // The engines' block tables of this request, and what prefill leaves in the producer's blocks.
    let (from_table, to_table) = ([5, 2, 9], [7, 3]);
    for rank in &producers {
        rank.elements(&from_table, |region, at, name| {
            region.write_at(at, &name.to_le_bytes()[..2])
        })?;
    }

    // Plan once per pair of ranks; list the segments once per request.
    let pairing = Pairing::new(&from, &to, 0)?;
    let (from_tables, to_tables) = ([BlockTable::new(&from_table)], [BlockTable::new(&to_table)]);
    let request = Request::whole(TOKENS, &from_tables, &to_tables);
    let mut list = SegmentList::new();
    for pair in pairing.pairs() {
        let (producer, consumer) = (&producers[pair.producer], &consumers[pair.consumer]);
        let plan = PeerPlan::compile(&producer.layout, &consumer.layout, pair)?;
        let limits: &Limits = &consumer.port.capabilities().limits;
        plan.segments(&request, Mode::Read, limits, &mut list)?;

        // Meet, and move: the consumer reads, and the producer is told when it has all.
        let (producer_here, consumer_there) = meet(consumer, producer).await?;
        let transfer = consumer.port.transfer(
            producer_here,
            Mode::Read,
            &consumer.set,
            list.as_slice(),
            Some(b"request 1"),
        )?;
        let report = transfer.await?;
        let (who, what) = producer.port.notified().await?;
        if (who, &*what) != (consumer_there, b"request 1") {
            return Err(Error::peer("move_blocks", "another notification than was sent"));
        }
        println!(
            "rank {} to rank {}: {} bytes in {} segments over {}",
            pair.producer, pair.consumer, report.bytes, report.segments, report.transport
        );
    }

    // Every element has the producer's value, where the consumer's layout has it.
    let mut elements = 0_u64;
    for rank in &consumers {
        rank.elements(&to_table, |region, at, name| {
            let mut bytes = [0; 2];
            region.read_at(at, &mut bytes)?;
            elements += 1;
            if bytes == name.to_le_bytes()[..2] {
                return Ok(());
            }
            Err(Error::new(ErrorKind::Internal, "move_blocks", "an element has a wrong value"))
        })?;
    }
    println!("{elements} elements are where they should be");
    for rank in producers.iter().chain(&consumers) {
        rank.port.close().await?;
    }
    Ok(())
}
