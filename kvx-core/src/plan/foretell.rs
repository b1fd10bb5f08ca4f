//! How long a list would be, told without listing it.

use std::collections::BTreeMap;

use super::compile::{Band, PeerPlan};
use super::pieces::Piece;
use super::request::Request;
use crate::Result;

impl PeerPlan {
    /// How many runs [`segments`](Self::segments) would go through for `request`. It merges those that continue each other, so
    /// this is never less than the length of its list before limits are applied, and equal to it where nothing merges across
    /// blocks or tensors. Takes time and memory by the number of blocks, none by the number of runs.
    ///
    /// # Errors
    ///
    /// As for [`segments`](Self::segments), but for cache groups that would be written in the same place, which only the list
    /// itself shows.
    pub fn runs(&self, request: &Request<'_>) -> Result<u64> {
        request.check()?;
        let all = request.layers.start <= self.layers.0 && self.layers.1 <= request.layers.end;
        let mut list = Vec::new();
        let mut runs = 0_u64;
        for (index, class) in self.classes.iter().enumerate() {
            class.pieces(request, &mut list)?;
            let lengths = lengths(&list);
            for band in self.bands.iter().filter(|band| band.class == index) {
                for (tokens, pieces) in &lengths {
                    let each = self.runs_of(band, all, request, *tokens);
                    runs = runs.saturating_add(each.saturating_mul(*pieces));
                }
            }
        }
        Ok(runs)
    }

    /// The runs of one piece of so many tokens, over all tensors of a band.
    fn runs_of(&self, band: &Band, all: bool, request: &Request<'_>, tokens: u32) -> u64 {
        let whole = band.whole.as_ref().filter(|_| all);
        if let Some(runs) = whole
            && tokens == self.classes[band.class].to.kernel_tokens
        {
            return runs.len() as u64;
        }
        let nests = band.nests.iter().filter(|nest| all || request.layers.contains(&nest.layer));
        nests.map(|nest| self.shapes[nest.shape].fold(tokens).count()).sum()
    }
}

/// How many pieces there are of each length, in tokens. Few lengths: those of whole blocks and of their ends.
fn lengths(pieces: &[Piece]) -> BTreeMap<u32, u64> {
    let mut lengths = BTreeMap::new();
    for same in pieces.chunk_by(|a, b| a.tokens == b.tokens) {
        *lengths.entry(same[0].tokens).or_insert(0) += same.len() as u64;
    }
    lengths
}
