//! Which of an engine's blocks are in use: nobody is let fetch to where somebody else fetches, reads or was invited.
//!
//! Kept for the engine as a whole, so that a request that is refused is refused before any rank has said anything of it.

use std::sync::{Arc, Mutex, PoisonError};

use kvx_core::layout::CacheGroup;
use kvx_core::{Error, Result};

use crate::rank::Kept;

/// What is done in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// They are leased, or stored from: by many at once. Those who are invited to write share what comes before, too.
    Shares,
    /// They are fetched into: by one.
    Fetches,
}

/// A block that is fetched into. Below it: by how many it is shared.
const WRITTEN: u16 = u16::MAX;
/// Set while a list of blocks is looked through.
const MARK: u16 = 1 << 15;
const MOST_SHARES: u16 = MARK - 1;

/// The use of all blocks, by group.
#[derive(Debug)]
pub(super) struct Blocks {
    groups: Vec<Vec<u16>>,
}

/// Blocks in use, until this is dropped.
#[derive(Debug)]
struct Taken {
    of: Arc<Mutex<Blocks>>,
    uses: Use,
    blocks: Vec<(usize, usize)>,
}

impl Blocks {
    pub(super) fn new(groups: &[CacheGroup]) -> Arc<Mutex<Self>> {
        let group = |group: &CacheGroup| vec![0; group.blocks as usize];
        Arc::new(Mutex::new(Self { groups: groups.iter().map(group).collect() }))
    }

    /// Takes blocks, a list for each group, into use for as long as what is given lives. Null blocks are none.
    pub(super) fn take(
        this: &Arc<Mutex<Self>>,
        operation: &'static str,
        uses: Use,
        groups: &[CacheGroup],
        ids: &[&[u32]],
    ) -> Result<Kept> {
        let mut blocks = Vec::with_capacity(ids.iter().map(|ids| ids.len()).sum());
        for (number, (group, ids)) in groups.iter().zip(ids).enumerate() {
            let real = ids.iter().filter(|id| Some(**id) != group.null_block);
            blocks.extend(real.map(|id| (number, *id as usize)));
        }
        let mut all = this.lock().unwrap_or_else(PoisonError::into_inner);
        for (count, block) in blocks.iter().enumerate() {
            if let Err((why, remedy)) = all.mark(*block, uses) {
                blocks[..count].iter().for_each(|marked| *all.at(*marked) &= !MARK);
                return Err(Error::misuse(operation, why)
                    .with_context("group", block.0)
                    .with_context("id", block.1)
                    .with_context("blocks", groups[block.0].blocks)
                    .with_remedy(remedy));
            }
        }
        for block in &blocks {
            let state = all.at(*block);
            *state = if uses == Use::Fetches { WRITTEN } else { (*state & !MARK) + 1 };
        }
        drop(all);
        Ok(Kept::new(Taken { of: Arc::clone(this), uses, blocks }))
    }

    fn at(&mut self, (group, id): (usize, usize)) -> &mut u16 {
        &mut self.groups[group][id]
    }

    /// Whether a block can be used so, and is not in the list already: or what is wrong, and the remedy.
    fn mark(
        &mut self,
        (group, id): (usize, usize),
        uses: Use,
    ) -> Result<(), (&'static str, &'static str)> {
        let wait = "use blocks again once whoever uses them has ended: await what was begun before";
        let Some(state) = self.groups[group].get_mut(id) else {
            return Err((
                "a block id is outside of the pool",
                "name blocks of this engine's own pool: ids are below its number of blocks",
            ));
        };
        match (*state, uses) {
            (WRITTEN, _) => Err(("a block is being written by another fetch", wait)),
            (marked, _) if marked & MARK != 0 => Err((
                "a block is in the table twice",
                "name each block once: it holds one place of the request",
            )),
            (1.., Use::Fetches) => {
                Err(("a block is to be fetched into that is leased, or stored from", wait))
            }
            (MOST_SHARES, Use::Shares) => Err(("a block is leased too often", wait)),
            (_, _) => {
                *state |= MARK;
                Ok(())
            }
        }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        let mut all = self.of.lock().unwrap_or_else(PoisonError::into_inner);
        for block in &self.blocks {
            let state = all.at(*block);
            *state = if self.uses == Use::Fetches { 0 } else { *state - 1 };
        }
    }
}

#[cfg(test)]
mod tests {
    use kvx_core::layout::GroupKind;

    use super::*;

    fn group(null_block: Option<u32>) -> CacheGroup {
        let (kind, blocks) = (GroupKind::Attention, 10);
        CacheGroup { kind, block_tokens: 16, kernel_block_tokens: 16, blocks, null_block }
    }

    #[test]
    fn blocks_are_shared_by_many_or_fetched_into_by_one() {
        let groups = [group(Some(0)), group(None)];
        let blocks = Blocks::new(&groups);
        let take = |uses, ids: [&[u32]; 2]| {
            Blocks::take(&blocks, "fetch", uses, &groups, &ids).map_err(|error| error.to_string())
        };
        let says = |uses, ids: [&[u32]; 2], why: &str| {
            let error = take(uses, ids).unwrap_err();
            assert!(error.contains(why), "{error}");
        };
        let written = take(Use::Fetches, [&[0, 0, 3, 4], &[5]]).unwrap();
        for uses in [Use::Shares, Use::Fetches] {
            says(uses, [&[], &[2, 5]], "being written by another fetch");
            says(uses, [&[10], &[]], "outside of the pool (group=0, id=10, blocks=10)");
            says(uses, [&[], &[u32::MAX]], "outside of the pool");
            says(uses, [&[1, 2, 1], &[]], "twice (group=0, id=1");
        }
        let read = [(); 2].map(|()| take(Use::Shares, [&[1], &[1, 2]]).unwrap());
        says(Use::Fetches, [&[], &[2]], "leased, or stored from");
        let shared = written.clone();
        drop(written);
        says(Use::Fetches, [&[3], &[]], "being written");
        drop(shared);
        let [one, other] = read;
        drop(one);
        says(Use::Fetches, [&[], &[2]], "leased, or stored from");
        drop(other);
        take(Use::Fetches, [&[1, 2, 3, 4, 5], &[1, 2, 3, 4, 5]]).unwrap();
        // What was refused has left nothing behind.
        let all = blocks.lock().unwrap();
        assert!(all.groups.iter().flatten().all(|state| *state == 0));
    }
}
