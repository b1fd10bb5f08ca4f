//! No two tensors of one group may share a byte. (Tensors of different groups may: a block belongs to one group at a
//! time.)
//!
//! Tensors that reach across each other are taken apart axis by axis: where all of them step alike along their longest
//! axis, it is enough to look at one step of it, in which they usually lie side by side. Only what still reaches across
//! each other when there is no such axis left is compared row by row, and of such rows only so many are compared.

use super::super::tensor::{Axis, Tensor, TensorKey};
use super::refuse;
use crate::Result;

/// Most rows that are compared one by one. Layouts that engines use need next to none, and a peer that asks for more shall
/// not be given the memory.
const MAX_ROWS: u64 = 1 << 16;

/// One tensor, or one step of it, within what is being compared.
struct Piece {
    key: TensorKey,
    /// First byte.
    at: u64,
    /// Axes that are left, the longest stride first; all have more than one position.
    axes: Vec<Axis>,
    /// Bytes of one element.
    element: u64,
    /// First byte and one past the last, at every level that has been taken apart.
    ranges: Vec<(u64, u64)>,
}

impl Piece {
    fn new(tensor: &Tensor) -> Self {
        let mut axes: Vec<Axis> = [tensor.block, tensor.token, tensor.head, tensor.dim]
            .into_iter()
            .filter(|axis| axis.extent > 1)
            .collect();
        axes.sort_by_key(|axis| std::cmp::Reverse(axis.stride));
        Self {
            key: tensor.key(),
            at: tensor.base,
            axes,
            element: tensor.dtype.bytes(),
            ranges: Vec::new(),
        }
    }

    /// One past the last byte. Cannot overflow: the whole tensor lies in its region.
    fn end(&self) -> u64 {
        let reach: u64 =
            self.axes.iter().map(|axis| axis.stride * u64::from(axis.extent - 1)).sum();
        self.at + reach + self.element
    }

    /// Whether the two reach across each other at every level, this one included.
    fn meets(&self, other: &Self) -> bool {
        let mut levels = self.ranges.iter().zip(&other.ranges);
        levels.all(|(a, b)| a.0 < b.1 && b.0 < a.1)
            && self.at < other.end()
            && other.at < self.end()
    }

    /// Rows of bytes without gaps: where they begin, and how long each is.
    fn rows(&self, rows_left: &mut u64) -> Result<(Vec<u64>, u64)> {
        let mut row = self.element;
        let mut axes = self.axes.clone();
        while let Some(axis) = axes.pop_if(|axis| axis.stride == row) {
            row *= u64::from(axis.extent);
        }
        let count = axes.iter().try_fold(1_u64, |n, axis| n.checked_mul(axis.extent.into()));
        let Some(count) = count.filter(|count| count <= rows_left) else {
            return Err(refuse(format!(
                "{} lies across other tensors in too many rows to check (limit {MAX_ROWS})",
                self.key
            )));
        };
        *rows_left -= count;
        let mut starts = vec![self.at];
        for axis in axes {
            starts = (0..u64::from(axis.extent))
                .flat_map(|i| starts.iter().map(move |at| at + i * axis.stride))
                .collect();
        }
        Ok((starts, row))
    }
}

pub(super) fn check_disjoint(tensors: &[Tensor]) -> Result<()> {
    let mut order: Vec<&Tensor> = tensors.iter().collect();
    order.sort_by_key(|tensor| (tensor.group, tensor.region));
    let mut rows_left = MAX_ROWS;
    for tensors in order.chunk_by(|a, b| (a.group, a.region) == (b.group, b.region)) {
        let pieces = tensors.iter().map(|tensor| Piece::new(tensor)).collect();
        check_pieces(pieces, &mut rows_left)
            .map_err(|error| error.with_context("region", tensors[0].region))?;
    }
    Ok(())
}

/// Checks pieces that may lie anywhere. Each call takes one axis off, so it calls itself at most four deep.
fn check_pieces(mut pieces: Vec<Piece>, rows_left: &mut u64) -> Result<()> {
    pieces.sort_by_key(|piece| piece.at);
    let mut rest = pieces.into_iter().peekable();
    while let Some(first) = rest.next() {
        // All that reach across each other, at least through others.
        let mut end = first.end();
        let mut cluster = vec![first];
        while let Some(next) = rest.next_if(|next| next.at < end) {
            end = end.max(next.end());
            cluster.push(next);
        }
        if cluster.len() == 1 {
            continue;
        }
        match step(&cluster) {
            Some(stride) => check_pieces(within_step(cluster, stride), rows_left)?,
            None => check_rows(&cluster, rows_left)?,
        }
    }
    Ok(())
}

/// The stride of the longest axis, where all pieces have the same and none reaches out of a step that begins with the
/// first piece.
fn step(cluster: &[Piece]) -> Option<u64> {
    let longest = *cluster[0].axes.first()?;
    let alike = |piece: &Piece| {
        if piece.axes.first() != Some(&longest) {
            return false;
        }
        let at = (piece.at - cluster[0].at) % longest.stride;
        let span = piece.end() - piece.at - longest.stride * u64::from(longest.extent - 1);
        at + span <= longest.stride
    };
    cluster.iter().all(alike).then_some(longest.stride)
}

/// One step of each piece.
fn within_step(cluster: Vec<Piece>, stride: u64) -> Vec<Piece> {
    let origin = cluster[0].at;
    let one = |mut piece: Piece| {
        piece.ranges.push((piece.at, piece.end()));
        piece.at = (piece.at - origin) % stride;
        piece.axes.remove(0);
        piece
    };
    cluster.into_iter().map(one).collect()
}

/// Compares pieces that have no axis in common any more, pair by pair and row by row.
fn check_rows(cluster: &[Piece], rows_left: &mut u64) -> Result<()> {
    for (index, piece) in cluster.iter().enumerate() {
        for other in cluster[index + 1..].iter().filter(|other| piece.meets(other)) {
            let (rows, len) = piece.rows(rows_left)?;
            let (other_rows, other_len) = other.rows(rows_left)?;
            let mut all: Vec<(u64, u64)> = rows
                .into_iter()
                .map(|at| (at, len))
                .chain(other_rows.into_iter().map(|at| (at, other_len)))
                .collect();
            all.sort_unstable();
            if all.windows(2).any(|pair| pair[0].0 + pair[0].1 > pair[1].0) {
                return Err(refuse(format!("{} and {} share bytes", piece.key, other.key)));
            }
        }
    }
    Ok(())
}
