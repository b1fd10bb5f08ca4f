//! The blocks of one engine: who has which, and what is kept for later requests.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvx_core::layout::{CacheGroup, GroupKind, RankLayout, Window};
use kvx_core::{Error, Result};

use super::tags::Prompt;
use crate::trace::HASH_TOKENS;

/// The blocks of one data parallel replica. All of its ranks use the same block tables.
///
/// As in a running engine, free blocks are taken in the order in which they became free, so that after a while a request's
/// blocks are no neighbours; and whole blocks of [`HASH_TOKENS`] tokens stay, after their request has ended, until
/// their memory is needed.
#[derive(Debug)]
pub(crate) struct Pool {
    groups: Vec<GroupPool>,
    /// Whole blocks of [`HASH_TOKENS`] tokens, by the name of their chain.
    kept: BTreeMap<u64, Kept>,
    /// Tokens that all attention groups' blocks fit into without rest.
    step: u64,
    has_state: bool,
    clock: u64,
}

#[derive(Debug)]
struct GroupPool {
    group: CacheGroup,
    /// Windows of its layers.
    windows: Vec<Window>,
    free: VecDeque<u32>,
}

/// Blocks that hold the tokens of one of a chain's hash blocks.
#[derive(Debug)]
struct Kept {
    /// By group: blocks that end in these tokens, the null block where the layers did not need them.
    blocks: Vec<Vec<u32>>,
    /// Tokens of the request that wrote it: what its layers with windows have.
    written: u64,
    users: u32,
    used: u64,
}

/// The blocks that a request has.
#[derive(Clone, Debug)]
pub(crate) struct Lease {
    /// Block ids by group, from the request's first block on; the null block where none is needed.
    pub(crate) tables: Vec<Vec<u32>>,
    /// Tokens that it holds already.
    pub(crate) reused: u64,
    /// Hash blocks that others may use, too: how many, of the chain.
    shared: usize,
    /// Blocks of its own, by group: those that are written.
    pub(crate) own: Vec<Vec<u32>>,
}

impl Lease {
    /// How many hash blocks of its chain are kept.
    pub(crate) const fn shared(&self) -> usize {
        self.shared
    }
}

impl Pool {
    /// All blocks free, for ranks with these layouts.
    pub(crate) fn new(ranks: &[RankLayout]) -> Self {
        let mut groups: Vec<GroupPool> = Vec::new();
        for rank in ranks {
            for (index, group) in rank.groups().iter().enumerate() {
                if index == groups.len() {
                    let ids = (0..group.blocks).filter(|id| group.null_block != Some(*id));
                    let (group, windows) = (*group, Vec::new());
                    groups.push(GroupPool { group, windows, free: ids.collect() });
                }
            }
            for tensor in rank.tensors() {
                if let Some(group) = groups.get_mut(tensor.group as usize)
                    && !group.windows.contains(&tensor.window)
                {
                    group.windows.push(tensor.window);
                }
            }
        }
        let attention = groups.iter().filter(|group| group.group.kind == GroupKind::Attention);
        let step = attention.map(|group| group.group.block_tokens.into()).fold(1, common_multiple);
        let has_state = groups.iter().any(|group| group.group.kind == GroupKind::State);
        Self { groups, kept: BTreeMap::new(), step, has_state, clock: 0 }
    }

    /// Whether an empty pool has room for a request of `tokens` tokens.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`](kvx_core::ErrorKind::Config): it has not, and how many blocks it takes.
    pub(crate) fn check(&self, option: &'static str, tokens: u64) -> Result<()> {
        for group in &self.groups {
            let needed = group.range(tokens);
            let needed = needed.end - needed.start;
            let unused =
                u64::from(group.group.null_block.is_some_and(|id| id < group.group.blocks));
            let usable = u64::from(group.group.blocks) - unused;
            if needed > usable {
                return Err(Error::config(
                    option,
                    format!("a request of {tokens} tokens does not fit into the pool"),
                )
                .with_context("blocks", group.group.blocks)
                .with_context("needed", needed + unused)
                .with_context("block_tokens", group.group.block_tokens)
                .with_remedy(format!(
                    "give blocks={} or more, or cut prompts with --max-tokens",
                    needed + unused
                )));
            }
        }
        Ok(())
    }

    /// Gives a request its blocks: those of the prefix that is kept, and free ones for the rest. `None` when there is no
    /// room, until others are [released](Self::release).
    pub(crate) fn lease(&mut self, prompt: &Prompt) -> Option<Lease> {
        let hit = self.hit(prompt);
        self.clock += 1;
        for key in &prompt.chain()[..hit] {
            if let Some(kept) = self.kept.get_mut(key) {
                kept.users += 1;
                kept.used = self.clock;
            }
        }
        let reused = (hit as u64 * HASH_TOKENS) / self.step * self.step;
        let wanted: Vec<u64> = self
            .groups
            .iter()
            .map(|group| {
                let range = group.range(prompt.tokens());
                range.end - range.start.max(group.whole(reused)).min(range.end)
            })
            .collect();
        if !self.make_room(&wanted) {
            self.let_go(&prompt.chain()[..hit]);
            return None;
        }
        let mut lease =
            Lease { tables: Vec::new(), reused, shared: hit, own: vec![Vec::new(); wanted.len()] };
        for (index, wanted) in wanted.iter().enumerate() {
            let kept: Vec<u32> = prompt.chain()[..hit]
                .iter()
                .filter_map(|key| self.kept.get(key)?.blocks.get(index))
                .flatten()
                .copied()
                .collect();
            let group = &mut self.groups[index];
            lease.own[index] = group.free.drain(..as_index(*wanted)).collect();
            lease.tables.push(group.table(prompt.tokens(), &kept, &lease.own[index]));
        }
        Some(lease)
    }

    /// Keeps a request's whole hash blocks for others, once their data is there.
    pub(crate) fn keep(&mut self, prompt: &Prompt, lease: &mut Lease) {
        let whole = as_index(prompt.tokens() / HASH_TOKENS);
        let mut given = vec![BTreeSet::new(); self.groups.len()];
        for number in lease.shared..whole {
            let key = prompt.chain()[number];
            self.clock += 1;
            lease.shared = number + 1;
            let suits = self.suits(prompt, number);
            if let Some(old) = self.kept.get_mut(&key) {
                if suits || old.users > 0 {
                    // It is as good, or cannot be replaced now.
                    old.users += 1;
                    old.used = self.clock;
                    continue;
                }
                self.forget(key);
            }
            let blocks: Vec<Vec<u32>> = self
                .groups
                .iter()
                .zip(&lease.tables)
                .map(|(group, table)| group.ending_in(table, number as u64))
                .collect();
            for (given, blocks) in given.iter_mut().zip(&blocks) {
                given.extend(blocks.iter().copied());
            }
            let kept = Kept { blocks, written: prompt.tokens(), users: 1, used: self.clock };
            self.kept.insert(key, kept);
        }
        for (own, given) in lease.own.iter_mut().zip(&given) {
            own.retain(|id| !given.contains(id));
        }
    }

    /// Takes a request's blocks back. Those that are kept stay until their memory is needed.
    pub(crate) fn release(&mut self, prompt: &Prompt, lease: Lease) {
        self.let_go(&prompt.chain()[..lease.shared]);
        for (group, own) in self.groups.iter_mut().zip(lease.own) {
            group.free.extend(own.into_iter().rev());
        }
    }

    /// Blocks other than `written`, by group: up to `count` of each, the null block and the neighbours of those first.
    pub(crate) fn bystanders(&self, written: &[BTreeSet<u32>], count: usize) -> Vec<Vec<u32>> {
        self.groups
            .iter()
            .zip(written)
            .map(|(group, written)| {
                let null = group.group.null_block;
                let beside = written.iter().flat_map(|id| [id.wrapping_sub(1), id.wrapping_add(1)]);
                let mut found = BTreeSet::new();
                let all = null.into_iter().chain(beside).chain(0..group.group.blocks);
                for id in all.filter(|id| *id < group.group.blocks && !written.contains(id)) {
                    if found.len() == count {
                        break;
                    }
                    found.insert(id);
                }
                found.into_iter().collect()
            })
            .collect()
    }

    /// Hash blocks at the beginning of a prompt that are kept, with all that the layers still need of them.
    fn hit(&self, prompt: &Prompt) -> usize {
        let whole = as_index(prompt.tokens() / HASH_TOKENS);
        // The state after the last token is not kept: something must be moved with it.
        let most = match self.has_state && prompt.tokens().is_multiple_of(HASH_TOKENS) {
            true => whole.saturating_sub(1),
            false => whole,
        };
        (0..most).take_while(|number| self.suits(prompt, *number)).count()
    }

    /// Whether a hash block of a prompt is kept, with all that the layers still need of it.
    fn suits(&self, prompt: &Prompt, number: usize) -> bool {
        let Some(kept) = self.kept.get(&prompt.chain()[number]) else { return false };
        let end = (number as u64 + 1) * HASH_TOKENS;
        self.groups.iter().filter(|group| group.group.kind == GroupKind::Attention).all(|group| {
            let start = group.start_of(number as u64);
            group.windows.iter().all(|window| {
                let needed = window.first_needed(prompt.tokens());
                end <= needed || window.first_needed(kept.written) <= needed.max(start)
            })
        })
    }

    /// Frees kept blocks that nobody uses, the longest unused first, until each group has as many free as wanted.
    fn make_room(&mut self, wanted: &[u64]) -> bool {
        loop {
            let short = |(group, wanted): (&GroupPool, &u64)| (group.free.len() as u64) < *wanted;
            if !self.groups.iter().zip(wanted).any(short) {
                return true;
            }
            let unused = self.kept.iter().filter(|(_, kept)| kept.users == 0);
            let Some((key, _)) = unused.min_by_key(|(_, kept)| kept.used) else { return false };
            let key = *key;
            self.forget(key);
        }
    }

    fn forget(&mut self, key: u64) {
        let Some(kept) = self.kept.remove(&key) else { return };
        for (group, blocks) in self.groups.iter_mut().zip(kept.blocks) {
            let null = group.group.null_block;
            group.free.extend(blocks.into_iter().rev().filter(|id| null != Some(*id)));
        }
    }

    fn let_go(&mut self, chain: &[u64]) {
        for key in chain {
            if let Some(kept) = self.kept.get_mut(key) {
                kept.users = kept.users.saturating_sub(1);
            }
        }
    }
}

impl GroupPool {
    /// The blocks, by number, that a request of `tokens` tokens needs.
    fn range(&self, tokens: u64) -> std::ops::Range<u64> {
        let block = u64::from(self.group.block_tokens);
        let end = tokens.div_ceil(block);
        match self.group.kind {
            GroupKind::Attention => {
                let needed = self.windows.iter().map(|window| window.first_needed(tokens));
                let first = needed.min().unwrap_or(tokens);
                if first >= tokens { end..end } else { first / block..end }
            }
            // A state is in the last entry; the others are placeholders.
            _ => end.max(1) - 1..end.max(1),
        }
    }

    /// Blocks that end within the first `tokens` tokens.
    fn whole(&self, tokens: u64) -> u64 {
        match self.group.kind {
            GroupKind::Attention => tokens / u64::from(self.group.block_tokens),
            _ => 0,
        }
    }

    /// First token of the first block that ends in a hash block.
    fn start_of(&self, number: u64) -> u64 {
        let block = u64::from(self.group.block_tokens);
        number * HASH_TOKENS / block * block
    }

    /// Ids of the blocks that end in hash block `number` of a request.
    fn ending_in(&self, table: &[u32], number: u64) -> Vec<u32> {
        let (from, until) =
            (self.whole(number * HASH_TOKENS), self.whole((number + 1) * HASH_TOKENS));
        table.get(as_index(from)..as_index(until)).map(<[u32]>::to_vec).unwrap_or_default()
    }

    /// The block table of a request: kept blocks first, then null blocks up to the first that is needed, then its own.
    fn table(&self, tokens: u64, kept: &[u32], own: &[u32]) -> Vec<u32> {
        let null = self.group.null_block.unwrap_or_default();
        let range = self.range(tokens);
        let end = as_index(range.end);
        let mut table = vec![null; end];
        // Blocks that a window has moved past are as good as none.
        for (number, id) in kept.iter().enumerate().take(end) {
            if number as u64 >= range.start {
                table[number] = *id;
            }
        }
        table[end - own.len()..].copy_from_slice(own);
        table
    }
}

fn common_multiple(a: u64, b: u64) -> u64 {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    a / x.max(1) * b
}

fn as_index(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
